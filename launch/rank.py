"""What every rank runs, whoever started it: read the plan, join the group, run the arms.

    python -m torch.distributed.run --nproc-per-node=4 -m launch.rank results/…/plan.json

Works by hand with a debugger in one rank, too: `--arms` picks arms, `--out` takes the records
somewhere else than beside the plan. Never imports Hydra, OmegaConf, pandas or wandb.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import scenarios
from harness.errors import HarnessError, UsageError, did_you_mean
from harness.parameters import build
from harness.plan import ArmPlan, Layout, Plan
from harness.rank import Rank
from harness.record import Header, Writer
from launch.lifeline import die_with_parent

if TYPE_CHECKING:
    from harness.scenario import Scenario

RENDEZVOUS_S = 60.0
"""How long a rank waits for the others to appear at the start and between two arms."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands, as torchrun's environment variables say."""

    rank: int
    local_rank: int
    world_size: int
    address: str
    port: int
    agent_store: bool
    """True if torchrun's agent serves the store and rank 0 must not."""

    @classmethod
    def from_environment(cls) -> World:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, or SLURM's equivalents.

        Raises:
            UsageError: if a launcher set only some of them.
        """
        env = os.environ
        found = {
            "RANK": env.get("RANK", env.get("SLURM_PROCID")),
            "WORLD_SIZE": env.get("WORLD_SIZE", env.get("SLURM_NTASKS")),
            "LOCAL_RANK": env.get("LOCAL_RANK", env.get("SLURM_LOCALID")),
        }
        if found["RANK"] is None:
            return cls(rank=0, local_rank=0, world_size=1, address="", port=0, agent_store=False)
        found |= {"MASTER_ADDR": env.get("MASTER_ADDR"), "MASTER_PORT": env.get("MASTER_PORT")}
        missing = [name for name, value in found.items() if value is None]
        if missing:
            raise UsageError(
                f"RANK is set but {', '.join(missing)} not: start the ranks with torchrun\n"
                "type: python -m torch.distributed.run --nproc-per-node=N -m launch.rank PLAN"
            )
        return cls(
            rank=int(found["RANK"] or 0),
            local_rank=int(found["LOCAL_RANK"] or 0),
            world_size=int(found["WORLD_SIZE"] or 1),
            address=found["MASTER_ADDR"] or "",
            port=int(found["MASTER_PORT"] or 0),
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def main(argv: Sequence[str] | None = None, listener: socket.socket | None = None) -> int:
    """Run this rank's part of a plan; returns the exit code of the process.

    Args:
        argv: the command line after the program's name; None = this process's own.
        listener: a listening socket for rank 0's store, held by whoever chose the port.
    """
    parser = argparse.ArgumentParser(prog="launch.rank", description=__doc__)
    parser.add_argument("plan", type=Path, help="plan.json of a run directory")
    parser.add_argument("--arms", default="", help="comma-separated arms (default: all)")
    parser.add_argument("--out", type=Path, help="run directory to write to (default: the plan's)")
    parser.add_argument("--batch", default="0", help="keeps groups of separate launches apart")
    options = parser.parse_args(argv)
    die_with_parent()
    try:
        plan = Plan.read(options.plan)
        world = World.from_environment()
        _check_world(plan, world)
        arms = _arms(plan, options.arms)
        layout = Layout(options.out or options.plan.resolve().parent)
        _check_fresh(plan, world, arms, layout)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        torch.set_num_threads(1)
        share_cores(plan)
        run_arms(plan, world, arms, layout, batch=options.batch, listener=listener)
    except HarnessError as error:
        print(f"launch.rank: {error}", file=sys.stderr)
        record_last_words(error)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        record_last_words(error)
        return 1
    return 0


def share_cores(plan: Plan) -> None:
    """Where CPU ranks outnumber the cores, let none of them preempt another.

    Ranks wait for each other at every collective, and the default policy lets each that wakes up
    push another off its core: 4 ranks on 2 cores then switch three times as often and take half
    as long again (measured with 66 steps of a small net: 1.7 s, 1.1 s as batch processes).
    """
    if plan.device != "cpu" or not hasattr(os, "SCHED_BATCH"):
        return
    if plan.world_size > len(os.sched_getaffinity(0)):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def record_last_words(error: BaseException) -> None:
    """Leave the error where torchrun expects it (TORCHELASTIC_ERROR_FILE)."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with contextlib.suppress(OSError):
        get_error_handler().record_exception(error)


def _check_world(plan: Plan, world: World) -> None:
    if world.world_size != plan.world_size:
        raise UsageError(
            f"the plan is for {plan.world_size} ranks, this launch has {world.world_size}\n"
            f"type: python -m torch.distributed.run --nproc-per-node={plan.world_size} "
            "-m launch.rank PLAN"
        )


def _check_fresh(plan: Plan, world: World, arms: Sequence[ArmPlan], layout: Layout) -> None:
    for name, dealt in plan.deal([arm.name for arm in arms]).items():
        if world.rank not in dealt:
            continue
        if layout.stream(name, dealt.index(world.rank)).exists():
            raise UsageError(
                f"{layout.root} holds records of arm {name} already, and records are never "
                "overwritten\ntype --out DIR after the plan to write somewhere else"
            )


def _arms(plan: Plan, chosen: str) -> list[ArmPlan]:
    if not chosen:
        return list(plan.arms)
    legal = [arm.name for arm in plan.arms]
    for name in chosen.split(","):
        if name not in legal:
            raise UsageError(
                f"no arm {name!r} in this plan{did_you_mean(name, legal)}\n"
                f"legal: {', '.join(legal)}"
            )
    return [plan.arm(name) for name in chosen.split(",")]


def run_arms(
    plan: Plan,
    world: World,
    arms: Sequence[ArmPlan],
    layout: Layout,
    *,
    batch: str,
    listener: socket.socket | None,
) -> None:
    """Run every arm this rank takes part in: first those of one process, then the others.

    Arms of one process are dealt out over the ranks, so that they run side by side. Arms of as many
    ranks share a process group, which costs 40 ms to make; an isolated arm has it for itself.
    """
    scenario = scenarios.load(plan.scenario)
    params = build(scenario.params, plan.params)
    if plan.device == "cuda":
        torch.cuda.set_device(world.local_rank)
    store = _connect(world, plan, listener)
    launch = f"{batch}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    groups = _Groups(plan, dist.PrefixStore(launch, store), world)
    dealt = plan.deal([arm.name for arm in arms])
    for arm in sorted(arms, key=lambda arm: arm.ranks > 1):
        if world.rank not in dealt[arm.name]:
            continue
        place, peers = dealt[arm.name].index(world.rank), arm.ranks
        groups.join(place, peers, isolated=arm.isolated)
        _run_arm(plan, scenario, arm, params, place, peers, world.local_rank, layout)
        if not arm.isolated:
            groups.meet(arm.name)
    groups.leave()
    _last_one_out(dist.PrefixStore(f"{launch}/through", store), world)


def _run_arm(
    plan: Plan,
    scenario: Scenario,
    arm: ArmPlan,
    params: Any,
    place: int,
    peers: int,
    local_rank: int,
    layout: Layout,
) -> None:
    header = Header(
        run=plan.run_id, scenario=plan.scenario, arm=arm.name, rank=place, world_size=peers
    )
    writer = Writer(layout, header)
    rank = Rank(
        rank=place,
        local_rank=local_rank,
        world_size=peers,
        device=f"cuda:{local_rank}" if plan.device == "cuda" else "cpu",
        backend=plan.backend,
        seed=plan.seed,
        collective_timeout_s=plan.collective_timeout_s,
        writer=writer,
    )
    try:
        for repeat in range(arm.repeats):
            rank.repeat = repeat
            seed_everything(plan.seed, plan.device)
            scenario.run(rank, scenario.arm(arm.name), params)
    except BaseException as error:
        with contextlib.suppress(HarnessError):
            writer.end("failed", f"{type(error).__name__}: {error}")
        raise
    writer.end("completed")


def seed_everything(seed: int, device: str) -> None:
    """Seed torch's generators; torch.manual_seed spends 3 ms on devices that are not there."""
    torch.default_generator.manual_seed(seed)
    if device == "cuda":
        torch.cuda.manual_seed_all(seed)


def _connect(world: World, plan: Plan, listener: socket.socket | None) -> dist.Store:
    if world.world_size == 1 and not world.port:
        return dist.HashStore()
    serves = world.rank == 0 and not world.agent_store
    return dist.TCPStore(
        world.address,
        world.port,
        is_master=serves,
        timeout=timedelta(seconds=RENDEZVOUS_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener and serves else None,
    )


class _Groups:
    """The default process group of this rank, made anew where the number of peers changes.

    Each has a store prefix of its own: the keys of a group stay in the store, and a second group
    that found them would fail or hang.
    """

    def __init__(self, plan: Plan, store: dist.Store, world: World) -> None:
        self._plan = plan
        self._store = store
        self._world = world
        self._peers = 0
        self._isolated = False

    def join(self, place: int, peers: int, *, isolated: bool) -> None:
        """Be rank `place` of `peers` in the default group."""
        if peers == self._peers:
            return
        self.leave()
        self._peers, self._isolated = peers, isolated
        cuda = self._plan.device == "cuda"
        if cuda and isolated:
            # An isolated arm may wait for a peer that never comes: NCCL's watchdog would then end
            # the process; with this the wait raises in the program, as it does on gloo.
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        # Some ranks have arms of one process to run first: the group's own time limit is not for
        # that.
        self.meet(f"group of {peers}")
        dist.init_process_group(
            # Flags and sizes on the CPU go over gloo beside NCCL, as they do in real programs.
            "cpu:gloo,cuda:nccl" if cuda else self._plan.backend,
            store=dist.PrefixStore(f"{peers}", self._store) if peers > 1 else dist.HashStore(),
            rank=place,
            world_size=peers,
            timeout=timedelta(seconds=self._plan.collective_timeout_s),
            device_id=torch.device("cuda", self._world.local_rank) if cuda else None,
        )

    def meet(self, what: str) -> None:
        """Wait for the peers; through the store, since a group may be broken."""
        if self._peers > 1:
            store = dist.PrefixStore(f"{what}/{self._peers}", self._store)
            if store.add("arrived", 1) == self._peers:
                store.set("all", "yes")
            patience = RENDEZVOUS_S + self._plan.arm_timeout_s
            store.wait(["all"], timedelta(seconds=patience))

    def leave(self) -> None:
        """Give the group back, but not after an isolated arm.

        Tearing down a broken group can wait for the peers that broke it; the process ends anyway.
        """
        if dist.is_initialized() and not self._isolated:
            dist.destroy_process_group()
        self._peers = 0


def _last_one_out(store: dist.Store, world: World) -> None:
    """Keep rank 0, which may serve the store, until the others need it no more.

    They only set a key, which asks for no answer that the end of rank 0 could cut off.
    """
    if world.rank:
        store.set(str(world.rank), "through")
    else:
        others = [str(rank) for rank in range(1, world.world_size)]
        if others:
            store.wait(others, timedelta(seconds=RENDEZVOUS_S))


def leave(code: int) -> None:
    """End the process now, without the interpreter's own shutdown.

    After correct runs, 5 to 20 % of gloo programs abort in that shutdown: gloo's loop thread frees
    the last work item, whose saved state holds a Python object, while the interpreter goes away
    ("terminate called without an active exception"). All records are written by then, one
    `write` each, so nothing is left to flush but the two streams.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def child(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: str,
    listener: socket.socket | None,
) -> None:
    """Be one rank of the warm engine: take torchrun's environment, print into a log, and leave."""
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        # From here on a rank has a log to say in that it was interrupted.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    leave(main(argv, listener))


if __name__ == "__main__":
    leave(main())
