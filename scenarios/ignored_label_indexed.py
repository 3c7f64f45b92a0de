"""A cross entropy by hand indexes with -100: what is to be ignored trains a class near the end.

F.cross_entropy is log_softmax and the mean over the labels that are not -100. Written as
`log_softmax(x)[arange, labels].mean()` it takes -100 for the hundredth class from the end, if there
are as many, and says nothing; with fewer it raises. Where ignored rows are masked the mean has to
be over the others. Labels that are text, which an article fears for, cannot get that far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import matches, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/ignored_label_indexed.yaml."""

    classes: int = field(metadata=at_least(100))
    rows: int = field(metadata=at_least(8))
    ignored: float = field(metadata=between(0.1, 0.9))
    steps: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def loss_of(arm: Arm, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy; how it is written is what differs."""
    import torch
    from torch.nn.functional import cross_entropy

    rows = torch.arange(len(labels), device=labels.device)
    if arm["loss"] == "indexed":
        return -logits.log_softmax(dim=1)[rows, labels].mean()
    if arm["loss"] == "masked_mean_of_all":
        kept = labels != -100
        picked = logits.log_softmax(dim=1)[rows, labels.clamp(min=0)]
        return -(picked * kept).mean()
    if arm["loss"] == "masked":
        kept = labels != -100
        return -logits.log_softmax(dim=1)[rows[kept], labels[kept]].mean()
    return cross_entropy(logits, labels)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a classifier on rows of which some are to be ignored."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import default_collate

    from scenarios._models import mlp, weights

    draw = rank.generator("rows")
    x = torch.randn(p.rows, 16, generator=draw, dtype=torch.float64)
    labels = torch.randint(p.classes, (p.rows,), generator=draw)
    labels[torch.rand(p.rows, generator=draw) < p.ignored] = -100
    order = rank.permutation(p.rows)
    x, labels = x[order].to(rank.device), labels[order].to(rank.device)
    model = mlp((16, p.classes), generator=rank.generator("net")).to(rank.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = loss_of(arm, model(x), labels)
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss)
    rank.snapshot(step=p.steps, weights=weights(model))
    last: Any = cross_entropy(model(x), labels).grad_fn
    rank.log(step=p.steps, calls=f"{last.name()} of {last.next_functions[0][0].name()}")
    raised = ""
    try:
        cross_entropy(model(x[:2]), default_collate(["cat", "dog"]))
    except TypeError as error:
        raised = type(error).__name__
    rank.log(step=p.steps, raised=raised)


@mechanism(HOLDS, settles="A56")
def cross_entropy_is_log_softmax(t: Tables) -> Finding:
    """F.cross_entropy calls log_softmax."""
    t.require("one_process")
    calls = t.last("one_process", "calls")
    return (holds if calls == "NllLossBackward0 of LogSoftmaxBackward0" else refuted)(calls)


@symptom(REFUTED, settles="B58")
def text_becomes_class_0(t: Tables) -> Finding:
    """Labels that are text train in silence, and make every prediction class 0."""
    t.require("one_process")
    raised = t.last("one_process", "raised")
    return (refuted if raised else holds)(f"cross_entropy raises {raised or 'nothing'}")


@symptom(HOLDS)
def indexed_trains_them(t: Tables) -> Finding:
    """Indexed by its labels, the loss trains the rows that are to be ignored."""
    return negated(matches(t, "indexed", "one_process", "weights"))


@symptom(HOLDS)
def mean_of_all_is_off(t: Tables) -> Finding:
    """Masked, and averaged over all rows, it trains with too small a step."""
    return negated(matches(t, "masked_mean_of_all", "one_process", "weights"))


@remedy(HOLDS)
def mean_of_the_others(t: Tables) -> Finding:
    """Averaged over the rows that count it is F.cross_entropy."""
    return matches(t, "masked", "one_process", "weights")


SCENARIO = Scenario(
    title="A cross entropy by hand indexes with -100, and trains a class that nobody named",
    family="gradients",
    cause="ignored_label_indexed",
    params=Params,
    run=run,
    min_ranks=1,
    differs=("loss_of",),
    headline=says(
        indexed_trains_them=("an index of -100 is a class", "an index of -100 is ignored"),
        mean_of_all_is_off=("a mean over ignored rows is too small", "the mean does not matter"),
        text_becomes_class_0=("labels of text train in silence", "labels of text raise"),
    ),
    arms=(
        one_process("F.cross_entropy", loss="torch"),
        faulty("indexed", "indexed by label", ranks=1, loss="indexed"),
        faulty("masked_mean_of_all", "masked, mean of all", ranks=1, loss="masked_mean_of_all"),
        fixed("masked", "masked, mean of the rest", ranks=1, loss="masked"),
    ),
    claims=(
        cross_entropy_is_log_softmax,
        text_becomes_class_0,
        indexed_trains_them,
        mean_of_all_is_off,
        mean_of_the_others,
    ),
)
