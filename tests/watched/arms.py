"""Runs arms of scenarios and whole programs under the watcher, many in one set of ranks.

python -m torch.distributed.run --nproc-per-node=3 -m tests.watched.arms OUT CASES.json

CASES.json: {"scenario/arm": {"params": {...}}, "programs/wrong_no_sync --fixed": {}}; with
"audit": N every N-th update is replayed. OUT gets "scenario.arm.json" with the answer of each. A
case that raises on some rank is written down, and the next one gets a process group of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Its functions take the group that is there when they are defined for the default one.
import torch.distributed.nn.functional

import scenarios
from harness.parameters import build
from harness.plan import Layout
from harness.rank import Rank
from harness.record import Header, Writer
from harness.watch.answers.closing import answer
from harness.watch.audit.auditor import Auditor
from harness.watch.watcher import Watcher
from launch.rank import World, leave, seed_everything

SEED = 1
TIMEOUT_S = 20.0
PATIENCE_S = 3 * TIMEOUT_S


class Meeting:
    """The ranks' common store, and process groups that are made anew after a failure."""

    def __init__(self, store: dist.Store, place: int, world: int) -> None:
        """Wait for nobody yet."""
        self.place, self.world = place, world
        self._store = store
        self._groups = 0
        self._up = False

    def group(self) -> None:
        """Have a process group."""
        if not self._up:
            self._groups += 1
            join(dist.PrefixStore(f"group {self._groups}", self._store), self.place, self.world)
            self._up = True

    def all_well(self, name: str, well: bool) -> bool:
        """Wait for the others behind a case, and say whether it went well everywhere."""
        store = dist.PrefixStore(f"behind {name}", self._store)
        if not well:
            store.add("failed", 1)
        if store.add("through", 1) == self.world:
            store.set("all", "through")
        store.wait(["all"], timedelta(seconds=PATIENCE_S))
        if store.add("failed", 0) == 0:
            return True
        # Its peers may have left it in the middle of something.
        dist.destroy_process_group()
        self._up = False
        return False


def main() -> int:
    """Run the arms of one process first, dealt out over the ranks, then all others together."""
    out, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    here = World.from_environment()
    # Torchrun's agent serves it.
    store = dist.TCPStore(here.address, here.port, is_master=False)
    alone = [name for name in cases if peers(name) == 1]
    for name in alone[here.rank :: here.world_size]:
        join(dist.HashStore(), 0, 1)
        observe(out, name, cases[name])
        dist.destroy_process_group()
    meeting = Meeting(store, here.rank, here.world_size)
    for name in cases:
        if name not in alone:
            meeting.group()
            meeting.all_well(name, observe(out, name, cases[name]))
    return 0


def join(store: dist.Store, place: int, world: int) -> None:
    """Be a rank of a new default group."""
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=place, world_size=world, timeout=timeout)


def peers(name: str) -> int | None:
    """Return how many ranks a case has; None stands for all there are."""
    family, _, rest = name.partition("/")
    return None if family == "programs" else scenarios.load(family).arm(rest).ranks


def stem(name: str) -> str:
    """Return what the files of a case are called."""
    return name.replace("/", ".").replace(" --", ".")


def observe(out: Path, name: str, case: dict[str, Any]) -> bool:
    """Run a case with a watcher around it that is there before the model; say if it went well."""
    family, _, rest = name.partition("/")
    watcher = Watcher(folder=str(out / stem(name)))
    if "audit" in case:
        watcher.updates.auditor = Auditor(watcher.context, case["audit"])
    try:
        if family == "programs":
            run_program(*rest.split())
        else:
            run_arm(out, family, rest, case["params"])
        given = answer(watcher, script_code=0)
    except Exception:
        error = out / f"{stem(name)}.rank{dist.get_rank()}.error"
        error.write_text(traceback.format_exc())
        return False
    finally:
        watcher.close()
    if given is not None:
        text = {"answer": given.to_json(), "lines": given.lines()}
        (out / f"{stem(name)}.json").write_text(json.dumps(text, indent=1))
    return True


def run_program(module: str, *argv: str) -> None:
    """Run the `main` of a program, whose own output is not of interest."""
    main_of: Callable[[Sequence[str]], Any]
    main_of = importlib.import_module(f"tests.watched.programs.{module}").main
    seed_everything(SEED, "cpu")
    random.seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()):
        main_of(list(argv))


def run_arm(out: Path, scenario_name: str, arm_name: str, params: dict[str, Any]) -> None:
    """Run one arm as `launch.rank` does."""
    scenario = scenarios.load(scenario_name)
    place, world = dist.get_rank(), dist.get_world_size()
    header = Header(
        run="watched", scenario=scenario_name, arm=arm_name, rank=place, world_size=world
    )
    rank = Rank(
        rank=place,
        local_rank=place,
        world_size=world,
        device="cpu",
        backend="gloo",
        seed=SEED,
        collective_timeout_s=TIMEOUT_S,
        writer=Writer(Layout(out / "records" / scenario_name), header),
    )
    seed_everything(SEED, "cpu")
    scenario.run(rank, scenario.arm(arm_name), build(scenario.params, params))


if __name__ == "__main__":
    leave(main())
