"""Fine-tuning on shifted images: the frozen batch norm is the damage, and no LayerNorm undoes it.

An article fine-tunes on 32 images of another range, and recommends to freeze the batch norms and
put a LayerNorm into the head. Frozen, they normalise the new images by the range of the old ones:
that is the damage, and a LayerNorm behind them and a ReLU comes too late. Batch norms left in train
mode, or frozen with statistics estimated on the new images, do no harm.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import SAME_SE, says
from harness.scenario import Arm, Finding, Outcome, Scenario, at_least, between, one_of
from scenarios._digits import CLASSES, TRAIN, digits, prerequisite

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables

ROWS, PRETRAINING, WIDTH = 150, 25, 32  # Images and steps of the pre-training, hidden units.


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/bn_shift.yaml."""

    scale: str = field(metadata=one_of("toy", "real"))
    nets: int = field(metadata=at_least(8))
    few: int = field(metadata=between(16, ROWS))
    shift: float = field(metadata=at_least(0.0))
    steps: int = field(metadata=at_least(10))
    lr: float = field(metadata=at_least(1e-6))


def images(rank: Rank, p: Params) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (n, nets, pixels) in the old range, other ones for each net, and classes."""
    import torch

    draw = rank.generator("images")
    if p.scale == "real":
        found, order = digits(), torch.rand(TRAIN, p.nets, generator=draw).argsort(dim=0)[:ROWS]
        x = torch.cat([found.train_x[order], found.test_x[:, None].expand(-1, p.nets, -1)])
        y = torch.cat([found.train_y[order], found.test_y[:, None].expand(-1, p.nets)])
    else:
        y = torch.randint(CLASSES, (3 * ROWS, p.nets), generator=draw)
        centres = torch.randn(p.nets, CLASSES, 16, generator=draw)[torch.arange(p.nets), y]
        x = (0.9 * centres + 0.8 * torch.randn(centres.shape, generator=draw)).double()
    return x.to(rank.device), y.to(rank.device)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Pre-train, fine-tune on a few shifted images, test; what becomes of the norm differs."""
    import torch
    from torch import nn

    class Linear(nn.Module):  # One layer for each net: all of them train side by side.
        def __init__(self, fan_in: int, fan_out: int) -> None:
            super().__init__()
            weight = torch.randn(p.nets, fan_in, fan_out, generator=draw) / fan_in**0.5
            self.weight = nn.Parameter(weight.double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("rni,nio->rno", x, self.weight)

    def train(steps: int, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=p.lr, momentum=0.9)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss * p.nets).backward()
            optimizer.step()

    x, y = images(rank, p)
    draw = rank.generator("nets")
    norm = nn.BatchNorm1d(p.nets * WIDTH, dtype=torch.float64)
    body = Linear(x.shape[2], WIDTH), nn.Flatten(), norm, nn.ReLU(), nn.Unflatten(1, (p.nets, -1))
    model = nn.Sequential(*body, Linear(WIDTH, CLASSES)).to(rank.device)
    train(PRETRAINING, x[:ROWS], y[:ROWS])
    few, new = p.shift * (1 + x[: p.few]), p.shift * (1 + x[ROWS:])
    if arm["norm"] == "frozen_layer_norm":
        model.insert(len(body), nn.LayerNorm(WIDTH, elementwise_affine=False))
    if arm["norm"] == "re_estimated":
        norm.momentum = 1.0
        model(few)
    if arm["norm"] != "train":
        norm.eval()
    train(p.steps, few, y[: p.few])
    right = model.eval()(new).argmax(dim=2) == y[ROWS:]
    for net, accuracy in enumerate(right.double().mean(dim=0)):
        rank.log(step=net, accuracy=accuracy)


def better(t: Tables, arm: str, than: str) -> Finding:
    """Decide: paired over the nets, the arm is the more accurate one by 4 standard errors."""
    t.require(arm, than)
    mine, other = ([*t.series(name, "accuracy").values()] for name in (arm, than))
    gains = [one - two for one, two in zip(mine, other, strict=True)]
    mean, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    both = f"{arm} {statistics.fmean(mine):.3f}, {than} {statistics.fmean(other):.3f}"
    said = f"{both}: {mean:+.3f} ± {error:.2g} (n={len(gains)})"
    found = REFUTED if mean <= 0.0 else HOLDS if mean >= SAME_SE * error else Outcome.UNKNOWN
    return Finding(outcome=found, reason=said, effect=mean, floor=error, unit="gain in accuracy")


@remedy(REFUTED, settles="A19")
def frozen_with_layer_norm_is_best(t: Tables) -> Finding:
    """Frozen batch norms and a LayerNorm in the head are more accurate than batch norms left on."""
    return better(t, "layer_norm", "in_train")


@symptom(HOLDS, settles="~A19")
def freezing_is_the_damage(t: Tables) -> Finding:
    """Left in train mode the batch norms cost less accuracy than frozen ones."""
    return better(t, "in_train", "frozen")


@remedy(HOLDS)
def estimate_then_freeze(t: Tables) -> Finding:
    """Estimate the statistics anew on the new images before freezing them: no damage."""
    return better(t, "re_estimated", "frozen")


SCENARIO = Scenario(
    title="Frozen batch norms on shifted images: a LayerNorm behind them comes too late",
    family="buffers",
    cause="",
    params=Params,
    run=run,
    check=lambda p, ranks: prerequisite(p.scale),
    min_ranks=1,
    headline=says(
        freezing_is_the_damage=("freezing costs the accuracy", "freezing is not the damage"),
        frozen_with_layer_norm_is_best=("a LayerNorm undoes it", "no LayerNorm makes up for it"),
    ),
    arms=(
        reference("in_train", "norms in train mode", ranks=1, norm="train"),
        faulty("frozen", "norms frozen", ranks=1, norm="frozen"),
        control("layer_norm", "frozen, LayerNorm in the head", ranks=1, norm="frozen_layer_norm"),
        fixed("re_estimated", "estimated anew, then frozen", ranks=1, norm="re_estimated"),
    ),
    claims=(frozen_with_layer_norm_is_best, freezing_is_the_damage, estimate_then_freeze),
)
