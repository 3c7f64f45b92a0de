"""Softmax in front of CrossEntropyLoss: no NaN, only a loss that cannot fall, and small gradients.

CrossEntropyLoss takes logits and the log_softmax of them. Given probabilities it takes the softmax
of numbers between 0 and 1: at best the label has 1 and the others 0, which is a loss of
log(e + classes - 1) - 1, 1.46 for ten classes. An article has it that a probability of 0 gives NaN;
what it gives is training that hardly moves. log_softmax twice is the same as once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, mean_is, negated, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, holds, one_of, refuted
from scenarios._digits import CLASSES, digits, prerequisite

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/double_softmax.yaml."""

    scale: str = field(metadata=one_of("toy", "real"))
    nets: int = field(metadata=at_least(8))
    steps: int = field(metadata=at_least(10))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a classifier; what is handed to cross_entropy is what differs."""
    import torch
    from torch.nn.functional import cross_entropy

    from scenarios._models import gradients, mlp

    draw = rank.generator("rows")
    if p.scale == "real":
        found = digits(rank.device)
        x, y, test_x, test_y = found.train_x, found.train_y, found.test_x, found.test_y
    else:
        classes = torch.randint(CLASSES, (600,), generator=draw)
        centres = torch.randn(CLASSES, 16, generator=draw)[classes]
        rows = (centres + 0.5 * torch.randn(600, 16, generator=draw)).double().to(rank.device)
        x, test_x = rows.split((300, 300))
        y, test_y = classes.to(rank.device).split((300, 300))

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if arm["before"] == "softmax":
            return cross_entropy(logits.softmax(dim=1), labels)
        if arm["before"] == "log_softmax":
            return cross_entropy(logits.log_softmax(dim=1), labels)
        return cross_entropy(logits, labels)

    # A label that is certain, and one whose probability is 0 in every dtype.
    for label in (0, 1):
        certain = torch.full((1, CLASSES), -1e4, dtype=torch.float64)
        certain[0, 0] = 1e4
        rank.log(step=label, extreme=loss_of(certain, torch.tensor([label])))
    for net in range(p.nets):
        widths = (x.shape[1], 32, CLASSES)
        model = mlp(widths, generator=rank.generator(f"net/{net}")).to(rank.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
        for step in range(p.steps):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            if step == 0:
                rank.log(step=net, gradient=gradients(model).norm())
            optimizer.step()
        right = (model(test_x).argmax(dim=1) == test_y).double()
        rank.log(step=net, loss=loss, accuracy=right.mean())


@symptom(REFUTED, settles="B49")
def gives_nan(t: Tables) -> Finding:
    """Softmax in front of CrossEntropyLoss gives NaN where a class has probability 0."""
    t.require("softmax")
    found = [*t.series("softmax", "extreme").values(), *t.series("softmax", "loss").values()]
    said = f"the loss of a label of probability 0 is {found[1]:.4g}"
    return (refuted if all(map(math.isfinite, found)) else holds)(said, effect=found[1])


@mechanism(HOLDS)
def loss_has_a_floor(t: Tables) -> Finding:
    """What it gives is a loss that cannot fall below log(e + classes - 1) - 1."""
    t.require("softmax")
    best, due = t.value("softmax", "extreme", step=0), math.log(math.e + CLASSES - 1.0) - 1.0
    said = f"the loss of a label that is certain is {best:.5g}, the bound {due:.5g}"
    return is_rounding(abs(best / due - 1.0), dtype_floor(EPS["float64"]), said, "share")


@mechanism(HOLDS)
def gradient_is_smaller(t: Tables) -> Finding:
    """Its first gradient is smaller than that of logits, for every net."""
    t.require("logits", "softmax")
    due, found = (t.series(arm, "gradient") for arm in ("logits", "softmax"))
    ratios = [found[net] / due[net] for net in due]
    smaller = max(ratios) < 1.0
    said = f"{min(ratios):.2g} to {max(ratios):.2g} of the gradient, over {len(ratios)} nets"
    return (holds if smaller else refuted)(said, effect=max(ratios), unit="share")


@symptom(HOLDS)
def learns_less(t: Tables) -> Finding:
    """After as many steps it is less accurate than with logits."""
    t.require("logits", "softmax")
    due, found = (t.series(arm, "accuracy") for arm in ("logits", "softmax"))
    return negated(mean_is([due[net] - found[net] for net in due], 0.0, "accuracy that is lost"))


@remedy(HOLDS)
def hand_over_logits(t: Tables) -> Finding:
    """Hand over logits; log_softmax in front does no harm, being the same twice as once."""
    t.require("logits", "log_softmax")
    due, found = (t.series(arm, "loss") for arm in ("logits", "log_softmax"))
    off = max(abs(found[net] / due[net] - 1.0) for net in due)
    # Each step hands its rounding on to all later ones.
    floor = dtype_floor(EPS["float64"] * t.root_params["steps"])
    return is_rounding(off, floor, f"the last losses differ by {off:.2g}", "share of the loss")


SCENARIO = Scenario(
    title="Softmax in front of CrossEntropyLoss: no NaN, a loss that cannot fall below 1.46",
    family="numerics",
    cause="softmax_twice",
    params=Params,
    run=run,
    check=lambda p, ranks: prerequisite(p.scale),
    min_ranks=1,
    headline=says(
        gives_nan=("a softmax too many gives NaN", "a softmax too many gives no NaN"),
        learns_less=("it learns less", "it learns as much"),
    ),
    arms=(
        reference("logits", "logits", ranks=1, before="nothing"),
        faulty("softmax", "logits.softmax(1)", ranks=1, before="softmax"),
        fixed("log_softmax", "logits.log_softmax(1)", ranks=1, before="log_softmax"),
    ),
    claims=(gives_nan, loss_has_a_floor, gradient_is_smaller, learns_less, hand_over_logits),
)
