"""track_running_stats: built with False it makes every evaluation depend on its batch.

A batch norm built without running statistics has nothing to normalise with but the batch at hand,
in eval mode too. Clearing the flag on a layer that has them, which an article recommends before an
export, does nothing in eval mode: the forward looks for the buffers. In train mode it stops their
update, which is how people freeze them; only the buffers set to None undo what was collected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, negated, repeats_records, says
from harness.scenario import Arm, Finding, Scenario, at_least

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/bn_untracked.yaml."""

    steps: int = field(metadata=at_least(1))
    rows: int = field(metadata=at_least(3))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a batch norm, then evaluate; what becomes of its statistics is what differs."""
    import torch
    from torch import nn

    from scenarios._models import FEATURES, rows

    tracks = arm["statistics"] != "built_without"
    norm = nn.BatchNorm1d(FEATURES, dtype=torch.float64, track_running_stats=tracks)
    norm.to(rank.device)
    for step in range(p.steps):
        norm(rows(rank, p.rows, name=f"batch/{step}")[0])
    if arm["statistics"] == "flag_cleared":
        norm.track_running_stats = False
    if arm["statistics"] == "buffers_removed":
        norm.running_mean = norm.running_var = None
    probe, others = rows(rank, p.rows, name="probe")[0], rows(rank, p.rows, name="others")[0]
    norm.eval()
    output, beside_others = norm(probe), norm(torch.cat([probe[:1], others[1:]]))
    kept = [buffer.clone() for buffer in norm.buffers()]
    norm.train()(probe)
    moved = any(not torch.equal(*pair) for pair in zip(kept, norm.buffers(), strict=True))
    rank.snapshot(step=0, output=output)
    rank.log(
        step=0,
        depends=int(not torch.equal(output[0], beside_others[0])),
        moved=int(moved),
    )


def depends(t: Tables, arm: str, answer: int) -> Finding:
    """Decide: in evaluation a row's output depends on the rows beside it (1), or does not (0)."""
    return counts(t, arm, "depends", answer, "of one row depend on the rows beside it")


@symptom(HOLDS)
def built_without_depends_on_mates(t: Tables) -> Finding:
    """Built without running statistics, a row's output depends on the others in evaluation too."""
    return depends(t, "built_without", 1)


@mechanism(HOLDS)
def tracked_does_not(t: Tables) -> Finding:
    """With running statistics the output of a row is its own in evaluation."""
    return depends(t, "tracked", 0)


@remedy(REFUTED, settles="A83")
def clearing_the_flag_matters(t: Tables) -> Finding:
    """bn.track_running_stats = False on a trained layer changes what it evaluates and exports."""
    return negated(repeats_records(t, "flag_cleared", "tracked", "output"))


@mechanism(HOLDS)
def cleared_flag_freezes(t: Tables) -> Finding:
    """What the cleared flag does is to freeze the statistics in train mode."""
    unit = "of one call moves the statistics"
    return all_of(
        counts(t, "flag_cleared", "moved", 0, unit), counts(t, "tracked", "moved", 1, unit)
    )


@symptom(HOLDS)
def removed_buffers_undo_them(t: Tables) -> Finding:
    """With its buffers set to None a trained layer evaluates like one built without."""
    return repeats_records(t, "buffers_removed", "built_without", "output")


SCENARIO = Scenario(
    title="A batch norm built without running statistics evaluates every row by its batch",
    family="buffers",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        built_without_depends_on_mates=("without statistics rows depend on rows", "rows do not"),
        clearing_the_flag_matters=(
            "clearing the flag changes evaluation",
            "clearing the flag afterwards changes nothing in evaluation",
        ),
    ),
    arms=(
        reference("tracked", "running statistics kept", ranks=1, statistics="tracked"),
        faulty("built_without", "built with False", ranks=1, statistics="built_without"),
        faulty("buffers_removed", "buffers set to None", ranks=1, statistics="buffers_removed"),
        control("flag_cleared", "flag cleared later", ranks=1, statistics="flag_cleared"),
    ),
    claims=(
        built_without_depends_on_mates,
        tracked_does_not,
        clearing_the_flag_matters,
        cleared_flag_freezes,
        removed_buffers_undo_them,
    ),
)
