"""One rank has a batch more than the others: it waits for gradients that nobody sends any more.

The samples do not divide by the number of ranks, and each rank loops over its own share. The rank
with one batch more goes into a reduction that the others never join, until the timeout; nothing in
the error names the cause. `Join` lets the others answer in the meantime, with zeros; by default it
still divides by all N ranks, so that the last update comes out too small. Reported in
pytorch/pytorch#33148 and #38174, Lightning-AI/pytorch-lightning#20404.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/uneven_inputs.yaml."""

    samples: int = field(metadata=at_least(3))
    batch: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    hang_timeout_s: float = field(metadata=at_least(0.1))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Behind the full batches one sample is left over: rank 0 has it to itself."""
    said = equal_shares(p, ranks)
    batch = p.batch if not said else ranks * max(1, round(p.batch / ranks))
    if p.samples % batch != 1 or p.samples < batch:
        typed = batch * max(1, p.samples // batch) + 1
        why = f"scenario.samples={p.samples} is not one more than batches of {batch}"
        said.append(f"{why}; type scenario.samples={typed}")
    return said


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train on this rank's share of the samples, for one epoch; what evens it out differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    from harness.waiting import gives_up
    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.samples, whole=True)
    back = rank.permutation(p.samples, name="rows").argsort()
    data = TensorDataset(rank.shard(x[back]), rank.shard(y[back]))
    loader = DataLoader(data, p.batch // rank.world_size, drop_last=arm["evens"] == "drop_last")
    even: Any = nullcontext()
    if arm["evens"].startswith("join"):
        even = model.join(divide_by_initial_world_size=arm["evens"] == "join")
    with gives_up(rank, arm, p.hang_timeout_s), even:
        for step, (inputs, targets) in enumerate(loader):
            rank.log(step=step, phase="begins", batch=step)
            order = rank.permutation(len(inputs), step=step)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[order]), targets[order]).backward()
            optimizer.step()
            rank.snapshot(step=step, so_far=weights(model))
    rank.snapshot(step=-(-p.samples // p.batch), weights=weights(model))


def all_finish(t: Tables, arm: str) -> Finding:
    """Say whether every rank has finished the last batch that it began."""
    t.require(arm)
    begun = [t.last(arm, "batch", phase="begins", rank=r) for r in t.ranks(arm)]
    done = [list(t.series(arm, "so_far.digest", rank=r))[-1] for r in t.ranks(arm)]
    stuck = [rank for rank, batch in enumerate(begun) if batch != done[rank]]
    reason = f"{arm}: waiting ranks: {stuck or 'none'}; the last batches are {begun} by rank"
    return (refuted if stuck else holds)(reason, effect=float(len(stuck)), unit="ranks that wait")


@symptom(HOLDS, source="pytorch/pytorch#33148")
def waits(t: Tables) -> Finding:
    """The rank with one batch more waits in it until the timeout."""
    raised = [t.last("uneven", "raised", phase="gave up", rank=r) for r in t.ranks("uneven")]
    waiting = [rank for rank, error in enumerate(raised) if error]
    alone = (holds if waiting == [0] else refuted)(f"ranks {waiting} give up: {raised[0]}")
    return all_of(negated(all_finish(t, "uneven")), alone)


@symptom(REFUTED)
def announced(t: Tables) -> Finding:
    """It shows beforehand: the ranks' weights part."""
    return negated(ranks_agree(t, "uneven", "so_far"))


@remedy(HOLDS)
def join_ends_wait(t: Tables) -> Finding:
    """Inside DDP's join() all ranks come to their end, with the same weights."""
    return all_of(all_finish(t, "join"), ranks_agree(t, "join", "weights"))


@remedy(REFUTED)
def join_is_one_process(t: Tables) -> Finding:
    """Inside join() as it is by default they train like one process."""
    return like_one_process(t, "join")


@remedy(HOLDS, source="pytorch/pytorch#38174")
def join_divides(t: Tables) -> Finding:
    """With join(divide_by_initial_world_size=False) they do."""
    return like_one_process(t, "join_divide")


@remedy(HOLDS, source="Lightning-AI/pytorch-lightning#20404")
def drop_last(t: Tables) -> Finding:
    """Full batches only: nobody waits, and up to there it is one process."""
    last = t.root_params["samples"] // t.root_params["batch"] - 1
    right = matches(t, "drop_last", "one_process", "so_far", step=last)
    return all_of(right, all_finish(t, "drop_last"), ranks_agree(t, "drop_last", "so_far"))


SCENARIO = Scenario(
    title="One rank has a batch more than the others, and waits for their gradients for ever",
    family="hangs",
    cause="uneven_inputs",
    params=Params,
    run=run,
    check=check,
    headline=says(
        waits=("a rank with one batch more waits in it", "nobody waits"),
        join_ends_wait=("join() ends the wait", "join() does not end the wait"),
        join_is_one_process=("its last update is right", "its last update is off"),
        join_divides=("dividing by those still there is right", "no division is right"),
    ),
    arms=(
        one_process("one process", evens="nothing"),
        faulty("uneven", "each rank loops over its share", evens="nothing", isolated=True),
        fixed("join", "inside model.join()", evens="join"),
        fixed("join_divide", "join(divide_by_initial_world_size=False)", evens="join_divide"),
        fixed("drop_last", "DataLoader(drop_last=True)", evens="drop_last"),
    ),
    claims=(waits, announced, join_ends_wait, join_is_one_process, join_divides, drop_last),
)
