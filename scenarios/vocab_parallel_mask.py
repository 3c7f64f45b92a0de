"""A vocabulary split over ranks, and tokens of other ranks looked up in row 0: every sum is off.

Each rank holds a slice of the embedding table. It shifts the ids into its slice, sets those of
other ranks to 0 so that they can be looked up, and the sum over ranks gives every token its vector.
That is, if what was looked up for foreign ids is then set to zero. Without that second mask every
rank adds the first row of its slice to all tokens that are not its own. All ranks get the same sum.
Why two masks are needed is asked in NVIDIA/Megatron-LM#926 and deepseek-ai/DeepSeek-V3#298.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, like_one_process, matches, negated, ranks_agree, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Plot, Scenario, at_least

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/vocab_parallel_mask.yaml."""

    steps: int = field(metadata=at_least(1))
    tokens: int = field(metadata=at_least(2))
    vocabulary: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Every rank holds as many rows, and more than one: the row of id 0 is a right one, too."""
    if p.vocabulary % ranks == 0 and p.vocabulary >= 2 * ranks:
        return []
    return [
        f"scenario.vocabulary={p.vocabulary} rows cannot be split into {ranks} equal slices of two "
        f"or more; type scenario.vocabulary={ranks * max(2, round(p.vocabulary / ranks))}"
    ]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Fit the vectors of tokens; what becomes of looked-up rows of foreign ids differs."""
    import torch
    from torch.distributed.nn.functional import all_gather, all_reduce

    width = 8
    draw = rank.generator("vocabulary")
    table = torch.randn(p.vocabulary, width, generator=draw, dtype=torch.float64)
    ids = torch.randint(p.vocabulary, (p.tokens,), generator=draw)
    wanted = torch.randn(p.tokens, width, generator=draw, dtype=torch.float64)
    order = rank.permutation(p.tokens)
    ids, wanted = ids[order].to(rank.device), wanted[order].to(rank.device)
    mine = torch.nn.Parameter(table.chunk(rank.world_size)[rank.rank].to(rank.device))
    optimizer = torch.optim.SGD([mine], lr=p.lr)
    rank.snapshot(step=0, before=table)
    for step in range(p.steps):
        optimizer.zero_grad()
        local = ids - rank.rank * len(mine)
        foreign = (local < 0) | (local >= len(mine))
        found = torch.nn.functional.embedding(local.masked_fill(foreign, 0), mine)
        if arm["zeroes"]:
            found = found.masked_fill(foreign[:, None], 0.0)
        vectors = all_reduce(found)
        if arm.get("divides"):
            vectors = vectors / rank.world_size
        # Every rank computes this loss, and backward of the all-reduce adds up what they send.
        loss = torch.nn.functional.mse_loss(torch.tanh(vectors), wanted) / rank.world_size
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss * rank.world_size)
        rank.snapshot(step=step, mean=vectors.mean(dim=0), ids=ids)
        rank.snapshot(step=step, table=torch.cat(all_gather(mine)))


@symptom(HOLDS)
def vectors_off(t: Tables) -> Finding:
    """Without the second mask the first forward gives other vectors than one process."""
    return negated(matches(t, "not_zeroed", "one_process", "mean", step=0))


@symptom(REFUTED)
def ranks_differ(t: Tables) -> Finding:
    """The ranks get different vectors."""
    return negated(ranks_agree(t, "not_zeroed", "mean"))


@mechanism(HOLDS, source="NVIDIA/Megatron-LM#926")
def first_rows_added(t: Tables) -> Finding:
    """What is too much is the first row of each slice, for all tokens of the others."""
    import numpy as np

    t.require("not_zeroed", "one_process")
    right, got = (t.snapshot(arm, "mean", step=0) for arm in ("one_process", "not_zeroed"))
    slices, rows = len(t.ranks("not_zeroed")), t.root_params["vocabulary"]
    first = t.snapshot("one_process", "before", step=0).reshape(rows, -1)[:: rows // slices]
    owners = t.snapshot("one_process", "ids", step=0).astype(int) // (rows // slices)
    added = first.sum(axis=0), first[owners].mean(axis=0)
    # Rounding is that of the numbers added up, not of what is left where they cancel.
    size = sum(float(np.linalg.norm(part)) for part in (right, *added))
    gap = float(np.linalg.norm(got - (right + added[0] - added[1]))) / size
    reason = f"with the first rows of the {slices} slices added the right ones are {gap:.2g} off"
    floor = rounding(t, "one_process", "mean", step=0)
    return is_rounding(gap, floor, reason, "share of what is added up")


@remedy(REFUTED)
def divide(t: Tables) -> Finding:
    """Dividing the sum by the number of ranks makes up for it."""
    return matches(t, "divided", "one_process", "mean", step=0)


@remedy(HOLDS, source="deepseek-ai/DeepSeek-V3#298")
def zero_foreign(t: Tables) -> Finding:
    """With foreign rows set to zero the table trains like that of one process."""
    return like_one_process(t, "zeroed", "table")


SCENARIO = Scenario(
    title="A vocabulary split over ranks without its second mask: foreign tokens get extra rows",
    family="parallel layouts",
    cause="vocab_parallel_mask",
    params=Params,
    run=run,
    check=check,
    headline=says(
        vectors_off=("without the second mask all vectors are off", "the vectors are right"),
        ranks_differ=("ranks differ", "alike on all ranks"),
        first_rows_added=("by the first rows of the slices", "by something else"),
        divide=("dividing by N helps", "dividing by N does not help"),
    ),
    arms=(
        one_process("one process, the whole table", zeroes=True),
        faulty("not_zeroed", "foreign ids get row 0", zeroes=False),
        faulty("divided", "the same, divided by the number of ranks", zeroes=False, divides=True),
        fixed("zeroed", "foreign rows set to zero", zeroes=True),
    ),
    claims=(vectors_off, ranks_differ, first_rows_added, divide, zero_foreign),
    plots=(Plot(metric="loss", title="Loss", log=True),),
)
