"""Runs arms of scenarios under the watcher, many in one set of ranks, and writes what it answers.

python -m torch.distributed.run --nproc-per-node=3 -m tests.watched.arms OUT CASES.json

CASES.json: {"scenario/arm": {"params": {...}}}. OUT gets "scenario.arm.json" for each of them.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
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
from harness.watch.closing import answer
from harness.watch.watcher import Watcher
from launch.rank import World, seed_everything

SEED = 1
TIMEOUT_S = 30.0


def main() -> None:
    """Run arms of one process first, dealt out over the ranks, then all others together."""
    out, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    here = World.from_environment()
    place, world = here.rank, here.world_size
    # Torchrun's agent serves it.
    store = dist.TCPStore(here.address, here.port, is_master=False)
    alone = [name for name in cases if of(name).ranks == 1]
    if place < len(alone):
        with group(dist.HashStore(), 0, 1):
            for name in alone[place::world]:
                observe(out, name, cases[name]["params"])
    together = [name for name in cases if name not in alone]
    with group(dist.PrefixStore("together", store), place, world):
        for name in together:
            observe(out, name, cases[name]["params"])
            dist.barrier()


def of(name: str) -> Any:
    """Return the arm of `scenario/arm`."""
    scenario, _, arm = name.partition("/")
    return scenarios.load(scenario).arm(arm)


@contextmanager
def group(store: dist.Store, place: int, peers: int) -> Iterator[None]:
    """Be rank `place` of so many peers."""
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=place, world_size=peers, timeout=timeout)
    yield
    dist.destroy_process_group()


def observe(out: Path, name: str, params: dict[str, Any]) -> None:
    """Run one arm as `launch.rank` does, with a watcher around it that is there before the model.

    Raises:
        Exception: whatever the arm raises, after it has been written down.
    """
    scenario_name, _, arm_name = name.partition("/")
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
    watcher = Watcher(folder=str(out / f"{scenario_name}.{arm_name}"))
    try:
        scenario.run(rank, scenario.arm(arm_name), build(scenario.params, params))
        given = answer(watcher, script_code=0)
    except Exception:
        (out / f"{scenario_name}.{arm_name}.rank{place}.error").write_text(traceback.format_exc())
        raise
    finally:
        watcher.close()
    if given is not None:
        text = {"answer": given.to_json(), "lines": given.lines()}
        (out / f"{scenario_name}.{arm_name}.json").write_text(json.dumps(text, indent=1))


if __name__ == "__main__":
    main()
