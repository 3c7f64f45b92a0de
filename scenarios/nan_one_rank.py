"""A loss that is NaN on one rank: an assert stops that rank, and the others wait for it.

One bad row makes one rank's loss NaN, and the averaged gradient NaN on all ranks in the same step.
The assert that saves a run on one GPU raises on that rank alone; if its process lives on, the
others stay in the reduction until the timeout, half an hour by default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/nan_one_rank.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    hang_timeout_s: float = field(metadata=at_least(0.1))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train; half way a row of the last rank is NaN. Who looks at what differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from harness.waiting import gives_up
    from scenarios._models import gradients, net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)

    def train() -> None:
        for step in range(p.steps):
            x, y = rows(rank, p.batch, name=f"batch/{step}")
            if step == p.steps // 2 and rank.rank == rank.world_size - 1:
                x[-1] = float("nan")
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            bad = loss.isnan().int()
            rank.log(step=step, loss_is_nan=int(bad))
            if arm["looks_at"] == "everybody's loss":
                dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            if arm["looks_at"].endswith("loss"):
                assert not bad, f"NaN in step {step}"
            loss.backward()
            if arm["looks_at"] == "gradient":
                assert not gradients(model).isnan().any(), f"NaN in step {step}"
            optimizer.step()
            rank.snapshot(step=step, weights=weights(model))

    said = ""
    with gives_up(rank, arm, p.hang_timeout_s):
        try:
            train()
        except AssertionError as error:
            said = str(error)  # The script notes it, and its process lives on.
    rank.log(step=p.steps, phase="end", said=said)


def stops_in_time(t: Tables, arm: str) -> Finding:
    """Say whether every rank raises in the step of the bad row, with weights that are finite."""
    t.require(arm)
    due = f"NaN in step {t.root_params['steps'] // 2}"
    silent = [rank for rank in t.ranks(arm) if t.last(arm, "said", rank=rank) != due]
    lost = [rank for rank in t.ranks(arm) if t.last(arm, "weights.nonfinite", rank=rank)]
    reason = (
        f"{arm}: ranks {silent or 'none'} do not raise, the weights of {lost or 'none'} are NaN"
    )
    return (refuted if silent or lost else holds)(reason, effect=float(len(silent)), unit="ranks")


@remedy(HOLDS, settles="B53")
def assert_on_one(t: Tables) -> Finding:
    """On one process `assert not loss.isnan()` before backward stops it before a weight is NaN."""
    return stops_in_time(t, "one_process")


@remedy(REFUTED, settles="B53")
def assert_on_each(t: Tables) -> Finding:
    """The same line does it on several ranks, too."""
    return stops_in_time(t, "own_assert")


@symptom(HOLDS)
def others_wait(t: Tables) -> Finding:
    """The rank with the bad row raises, and the others wait for it until the timeout."""
    t.require("own_assert")
    raised = [t.last("own_assert", "raised", rank=r) for r in t.ranks("own_assert")]
    due = all(raised[:-1]) and not raised[-1]
    return (holds if due else refuted)(f"all but the last rank give up with: {raised[0] or '-'}")


@symptom(HOLDS)
def reaches_all(t: Tables) -> Finding:
    """Unchecked, the loss is NaN on one rank, and in that step the weights become so on all."""
    t.require("unchecked")
    bad, ranks = t.root_params["steps"] // 2, t.ranks("unchecked")
    losses = [r for r in ranks if t.value("unchecked", "loss_is_nan", step=bad, rank=r)]
    lost = [r for r in ranks if t.value("unchecked", "weights.nonfinite", step=bad, rank=r)]
    due = losses == [ranks[-1]] and lost == list(ranks)
    reason = f"in step {bad} the loss is NaN on ranks {losses}, weights are on ranks {lost}"
    return all_of((holds if due else refuted)(reason), ranks_agree(t, "unchecked", "weights"))


@remedy(HOLDS)
def agree(t: Tables) -> Finding:
    """Take the maximum of the flag over the ranks first: all of them raise, in that step."""
    return stops_in_time(t, "agreed")


@remedy(HOLDS)
def look_at_gradient(t: Tables) -> Finding:
    """Look at the averaged gradient instead: all raise in that step, without another reduction."""
    return stops_in_time(t, "gradient")


SCENARIO = Scenario(
    title="NaN on one rank: an assert stops that rank, and leaves the others waiting for it",
    family="hangs",
    cause="rank_raised",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        assert_on_one=("an assert saves one process", "an assert saves not even one process"),
        others_wait=("on N ranks it leaves the others waiting", "on N ranks nobody waits"),
    ),
    arms=(
        reference("one_process", "one process, with the assert", ranks=1, looks_at="own loss"),
        control("unchecked", "nobody looks", looks_at="nothing"),
        faulty("own_assert", "each rank asserts on its loss", looks_at="own loss", isolated=True),
        fixed("agreed", "flag reduced, then the assert", looks_at="everybody's loss"),
        fixed("gradient", "assert on the averaged gradient", looks_at="gradient"),
    ),
    claims=(assert_on_one, assert_on_each, others_wait, reaches_all, agree, look_at_gradient),
)
