"""Random flips left on in validation: no harm to a model that was trained with them.

An article takes them for leaked data that hold the accuracy down. A model that has seen both sides
in training is as accurate on flipped pictures as on plain ones. One that was trained without flips
is not, which is a shift of the data and no leak; and where the label is the side itself, the flips
of the training have left nothing to learn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, reference
from harness.claims import HOLDS, REFUTED, mechanism, symptom
from harness.findings import mean_is, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, one_of
from scenarios._digits import CLASSES, PIXELS, digits, prerequisite

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/flips_in_validation.yaml."""

    scale: str = field(metadata=one_of("toy", "real"))
    nets: int = field(metadata=at_least(8))
    steps: int = field(metadata=at_least(10))
    lr: float = field(metadata=at_least(1e-6))


def pictures(rank: Rank, p: Params, what: str, net: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures and labels, the first half to train on: of a class, or brighter on a side."""
    import torch

    draw = rank.generator(f"pictures/{net}")
    if what == "class" and p.scale == "real":
        found = digits()
        x, y = torch.cat([found.train_x, found.test_x]), torch.cat([found.train_y, found.test_y])
        order = torch.randperm(len(y), generator=draw)[:400]
        return x[order].to(rank.device), y[order].to(rank.device)
    x = torch.randn(400, PIXELS, generator=draw, dtype=torch.float64)
    if what == "side":
        y = torch.randint(2, (400,), generator=draw)
        left = torch.arange(PIXELS) % 8 < 4
        x = x + torch.where(left == (y[:, None] == 0), 0.5, -0.5)
    else:
        y = torch.randint(CLASSES, (400,), generator=draw)
        x = 2.0 * x + torch.randn(CLASSES, PIXELS, generator=draw)[y]
    return x.to(rank.device), y.to(rank.device)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train on pictures, validate plain and flipped; whether training flips is what differs."""
    import torch
    from torch.nn.functional import cross_entropy

    from scenarios._models import mlp

    def flipped(x: torch.Tensor) -> torch.Tensor:
        some = (torch.rand(len(x)) < 0.5).to(x.device)
        mirrored = x.view(-1, 8, 8).flip(2).flatten(1)
        return torch.where(some[:, None], mirrored, x)

    for net in range(p.nets):
        x, y = pictures(rank, p, arm["label"], net)
        half = len(x) // 2
        model = mlp((PIXELS, 32, CLASSES), generator=rank.generator(f"net/{net}"))
        model.to(rank.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
        for _ in range(p.steps):
            batch = flipped(x[:half]) if arm["trains_with_flips"] else x[:half]
            optimizer.zero_grad()
            cross_entropy(model(batch), y[:half]).backward()
            optimizer.step()
        with torch.no_grad():
            for name, held_out in (("plain", x[half:]), ("flipped", flipped(x[half:]))):
                right = (model(held_out).argmax(dim=1) == y[half:]).double()
                rank.log(step=net, phase=name, accuracy=right.mean())


def lost(t: Tables, arm: str) -> Finding:
    """Decide: on flipped pictures the accuracy is another one than on plain ones."""
    t.require(arm)
    plain, flipped = (t.series(arm, "accuracy", phase=name) for name in ("plain", "flipped"))
    gaps = [plain[net] - flipped[net] for net in plain]
    return negated(mean_is(gaps, 0.0, f"accuracy that flips cost {arm}"))


@symptom(REFUTED, settles="B57")
def flips_hold_it_down(t: Tables) -> Finding:
    """Random flips left on in validation hold the accuracy down."""
    return lost(t, "trained_with_flips")


@symptom(HOLDS)
def new_flips_do(t: Tables) -> Finding:
    """They do where the model was trained without."""
    return lost(t, "trained_without")


@mechanism(HOLDS)
def side_cannot_be_learnt(t: Tables) -> Finding:
    """Where the label is the side, flips in training leave nothing to learn, flipped or not."""
    t.require("label_is_the_side")
    found = list(t.series("label_is_the_side", "accuracy", phase="flipped").values())
    return mean_is(found, 0.5, "accuracy on flipped pictures")


SCENARIO = Scenario(
    title="Random flips in validation cost nothing, if the training had them too",
    family="data",
    cause="",
    params=Params,
    run=run,
    check=lambda p, ranks: prerequisite(p.scale),
    min_ranks=1,
    headline=says(
        flips_hold_it_down=("flips in validation cost accuracy", "flips in validation are free"),
        new_flips_do=("unless training had none", "even if training had none"),
    ),
    arms=(
        reference("trained_with_flips", "flips", ranks=1, label="class", trains_with_flips=True),
        faulty("trained_without", "no flips", ranks=1, label="class", trains_with_flips=False),
        control("label_is_the_side", "flips", ranks=1, label="side", trains_with_flips=True),
    ),
    claims=(flips_hold_it_down, new_flips_do, side_cannot_be_learnt),
)
