"""One bucket damaged in one reduction on one rank: replicas part for good, and no loss tells.

A communication hook hands back what the ranks have sent each other. If a buffer is used too early,
or a link or a bit of memory fails, one rank gets zeros, the bucket of the step before, or a number
with a bit flipped. Then gradients are equal again, of unequal models. pytorch/pytorch#84803.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

DAMAGED = ("zeroed", "stale", "flipped")


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/comm_hook_drops_bucket.yaml."""

    steps: int = field(metadata=at_least(4))
    batch: int = field(metadata=at_least(1))
    bit: int = field(metadata=between(20, 51))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train with a hook that averages; what one rank gets in one step of chance differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import gradients, net, rows, weights

    bad_step = int(torch.randint(1, p.steps - 1, (), generator=rank.generator("when")))
    sent: list[torch.Tensor] = []

    def averaged(bucket: Any) -> Any:
        result = bucket.buffer() / rank.world_size
        dist.all_reduce(result)
        sent.append(result.clone())
        if len(sent) - 1 == bad_step and rank.rank == rank.world_size - 1:
            if arm["damage"] == "zeroed":
                result.zero_()
            if arm["damage"] == "stale":
                result.copy_(sent[bad_step - 1])
            if arm["damage"] == "flipped":
                result.view(torch.int64)[0] ^= 1 << p.bit
        return result

    def hook(bucket: Any) -> Any:
        result = averaged(bucket)
        if arm["redo"]:
            ends = torch.stack([result.sum(), -result.sum()])
            dist.all_reduce(ends, op=dist.ReduceOp.MAX)
            result = averaged(bucket) if ends.sum() else result
        done: Any = torch.futures.Future()
        done.set_result(result)
        return done

    model = DistributedDataParallel(net(rank))
    model.register_comm_hook(None, lambda _, bucket: hook(bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss, damaged=int(step == bad_step))
        rank.snapshot(step=step, gradients=gradients(model), weights=weights(model))


def apart(t: Tables, arm: str, name: str) -> tuple[list[int], range]:
    """Return the steps at which ranks differ in something, and those from the damage on."""
    t.require(arm)
    series = [t.series(arm, f"{name}.digest", rank=rank) for rank in t.ranks(arm)]
    (at,) = (step for step, damaged in t.series(arm, "damaged").items() if damaged)
    parted = [step for step in series[0] if len({one[step] for one in series}) > 1]
    return parted, range(at, max(series[0]) + 1)


@symptom(HOLDS, source="pytorch/pytorch#84803")
def parts_for_good(t: Tables) -> Finding:
    """Whatever the damage, the ranks' weights differ from that very step on, for good."""
    found = [apart(t, arm, "weights") for arm in DAMAGED]
    due = all(parted == list(since) for parted, since in found)
    return (holds if due else refuted)(f"weights differ at {found[0][0]}, hit in {found[0][1][0]}")


@mechanism(HOLDS)
def in_that_step_only(t: Tables) -> Finding:
    """Gradients differ in that step and in no other: whoever compares now and then misses it."""
    found = [apart(t, arm, "gradients") for arm in DAMAGED]
    due = all(parted == [since[0]] for parted, since in found)
    return (holds if due else refuted)(f"gradients differ at steps {found[0][0]}")


@symptom(REFUTED)
def loss_jumps(t: Tables) -> Finding:
    """One sees it in the loss of that rank, which changes more than in any step without damage."""
    t.require("hook")
    share = 0.0
    for arm in DAMAGED:
        at, last = apart(t, arm, "weights")[1][0], t.ranks(arm)[-1]
        loss, sound = (t.series(of, "loss", rank=last) for of in (arm, "hook"))
        usual = max(abs(sound[step + 1] - sound[step]) for step in list(sound)[:-1])
        share = max(share, abs(loss[at + 1] - loss[at]) / usual)
    reason = f"the loss then changes by {share:.3f} of the largest change without damage"
    return (holds if share > 1.0 else refuted)(reason, effect=share, unit="change / largest")


@remedy(HOLDS)
def compare_and_redo(t: Tables) -> Finding:
    """Compare a sum of each bucket in the hook, and reduce again: like one process."""
    return like_one_process(t, "compared")


SCENARIO = Scenario(
    title="One damaged bucket on one rank: replicas part for good, and no loss tells",
    family="synchronisation",
    cause="communication_hook",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        parts_for_good=("one damaged bucket parts the ranks for good", "the ranks agree again"),
        loss_jumps=("the loss jumps", "the loss does not show it"),
        compare_and_redo=("a checksum in the hook mends it", "a checksum does not help"),
    ),
    arms=(
        one_process("one process", damage="none", redo=False),
        control("hook", "the hook alone", damage="none", redo=False),
        faulty("zeroed", "zeros", damage="zeroed", redo=False),
        faulty("stale", "the bucket of the step before", damage="stale", redo=False),
        faulty("flipped", "one bit flipped", damage="flipped", redo=False),
        fixed("compared", "compares, reduces again", damage="flipped", redo=True),
    ),
    claims=(parts_for_good, in_that_step_only, loss_jumps, compare_and_redo),
)
