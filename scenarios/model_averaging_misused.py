"""Post-local SGD resumed without the averager's counter: a second warm-up, with nobody averaging.

After a warm-up the ranks train on their own gradients, and every few updates their weights are
averaged. The averager counts updates itself. PostLocalSGDOptimizer keeps its counter in state_dict;
a bare averager behind optimizer.step() loses it, so that a resumed run waits for its warm-up once
more while gradients are local already. Reported, as lost accuracy, in pytorch/pytorch#74157.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

_ALIVE: list[Any] = []  # Models: gloo's thread may still hold the last average of one.


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/model_averaging_misused.yaml."""

    warmup: int = field(metadata=at_least(2))
    period: int = field(metadata=at_least(2))
    rounds: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))


def check(p: Params, ranks: int) -> list[str]:
    """A second warm-up has to last beyond the next average."""
    said = equal_shares(p, ranks)
    short = f"scenario.warmup={p.warmup} is too short; type scenario.warmup={p.period}"
    return said + [short] * (p.warmup < p.period)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train, and resume behind the first average; who averages, and counts what, differs."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from harness.collectives import count_collectives
    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    _ALIVE.append(model)
    # Every rank is a node of its own: after the warm-up its gradients are reduced with nobody's.
    alone, _ = dist.new_subgroups(group_size=1)
    state = local_sgd.PostLocalSGDState(None, alone, p.warmup)
    model.register_comm_hook(state, local_sgd.post_localSGD_hook)
    local = torch.optim.SGD(model.parameters(), lr=p.lr)
    averager = PeriodicModelAverager(p.period, p.warmup)
    wrapper: Any = PostLocalSGDOptimizer(local, averager)
    for step in range(p.warmup + p.period * p.rounds + 1):
        if step == p.warmup + 1 and arm["resumed"]:
            saved = wrapper.state_dict()
            averager = PeriodicModelAverager(p.period, p.warmup)
            wrapper = PostLocalSGDOptimizer(local, averager)
            (wrapper if arm["calls"] == "wrapper" else local).load_state_dict(saved)
        x, y = rows(rank, p.batch, name=f"batch/{step}")
        model.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        with count_collectives() as calls:
            (local if arm["calls"] == "averager" else wrapper).step()
            if arm["calls"] != "wrapper":
                averager.average_parameters(model.parameters())
        rank.log(step=step, averages=calls.count("all_reduce"))
        rank.digest(step=step, weights=weights(model))


@symptom(HOLDS)
def resumed_apart(t: Tables) -> Finding:
    """Resumed with a bare averager, ranks still differ after the updates due to be averaged."""
    t.require("bare_resumed")
    ranks = t.ranks("bare_resumed")
    series = [t.series("bare_resumed", "weights.digest", rank=rank) for rank in ranks]
    warmup, period = t.root_params["warmup"], t.root_params["period"]
    due = [step for step in series[0] if step > warmup and (step - warmup) % period == 0]
    parted = [step for step in due if len({one[step] for one in series}) > 1]
    reason = f"weights differ between ranks at {parted or 'none'} of the averages due {due}"
    return (holds if parted == due else refuted)(reason, effect=float(len(parted)), unit="averages")


def same_run(t: Tables, arm: str, other: str) -> Finding:
    """Say whether every rank of two arms holds the same bits at every step."""
    t.require(arm, other)
    for rank in t.ranks(arm):
        mine, theirs = (t.series(a, "weights.digest", rank=rank) for a in (arm, other))
        parted = [step for step, digest in mine.items() if theirs.get(step) != digest]
        if parted:
            return refuted(f"rank {rank} of {arm} parts from {other} at step {parted[0]}")
    return holds(f"all ranks of {arm} hold the bits of {other} at all {len(mine)} steps")


@symptom(REFUTED, source="pytorch/pytorch#74157")
def bare_call_is_worse(t: Tables) -> Finding:
    """A bare averager behind optimizer.step() trains otherwise than PostLocalSGDOptimizer."""
    return negated(same_run(t, "bare", "wrapper"))


@mechanism(REFUTED)
def counts_updates(t: Tables) -> Finding:
    """Called beside the wrapper as well, the averager still averages at the same updates."""
    t.require("both", "wrapper")
    series = (t.series(arm, "averages") for arm in ("both", "wrapper"))
    both, due = ([step for step, sent in one.items() if sent] for one in series)
    reason = f"called beside the wrapper it averages at {both}, the wrapper alone at {due}"
    return (holds if both == due else refuted)(reason, effect=float(len(both)), unit="averages")


@remedy(HOLDS)
def state_dict(t: Tables) -> Finding:
    """Resumed with PostLocalSGDOptimizer's state_dict: as if it had never stopped."""
    return same_run(t, "wrapper_resumed", "wrapper")


SCENARIO = Scenario(
    title="Post-local SGD resumed without the averager's counter: ranks train apart for a warm-up",
    family="synchronisation",
    cause="model_averaging_misused",
    params=Params,
    run=run,
    check=check,
    headline=says(
        bare_call_is_worse=("a bare averager trains otherwise", "a bare averager is as good"),
        resumed_apart=("resumed, its ranks stay apart", "resumed, its ranks agree"),
        state_dict=("the wrapper's state_dict restores it", "the wrapper does not restore it"),
    ),
    arms=(
        reference("wrapper", "PostLocalSGDOptimizer", calls="wrapper", resumed=False),
        control("bare", "averager.average_parameters()", calls="averager", resumed=False),
        control("both", "both of them", calls="both", resumed=False),
        faulty("bare_resumed", "resumed, bare averager", calls="averager", resumed=True),
        fixed("wrapper_resumed", "resumed, wrapper", calls="wrapper", resumed=True),
    ),
    claims=(bare_call_is_worse, resumed_apart, counts_updates, state_dict),
)
