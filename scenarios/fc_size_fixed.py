"""A fully connected layer whose size is computed: it fits the size that it was computed with.

An article's template passes an empty image through the features and makes the head as wide as what
comes out. That fits this image; any other size raises at the head. As printed the template does not
even get that far: the method that builds the head uses a `num_classes` that only the constructor
knows. Adaptive pooling makes the head independent of the image.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/fc_size_fixed.yaml."""

    size: int = field(metadata=at_least(8))
    other: int = field(metadata=at_least(8))


CLASSES = 10


def network(arm: Arm, p: Params) -> Any:
    """Return the template's network; how its head gets its size is what differs."""
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.inner(x)

    class Network(nn.Module):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
            layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Residual(inner), nn.MaxPool2d(2)]
            if arm["head"] == "pooled":
                layers.append(nn.AdaptiveAvgPool2d(1))
            self.features = nn.Sequential(*layers, nn.Flatten())
            self.build_head(None if arm["head"] == "as_printed" else num_classes)

        def build_head(self, classes: int | None) -> None:
            width = self.features(torch.zeros(1, 3, p.size, p.size)).shape[1]
            # The template hands over nothing, and the constructor's argument is not known here.
            self.head = nn.Linear(width, classes or num_classes)  # type: ignore[name-defined]  # noqa: F821

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.features(x))

    return Network(CLASSES)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Build the network and show it images of two sizes."""
    import torch

    try:
        model = network(arm, p).to(rank.device)
    except NameError as error:
        rank.log(step=0, built=f"NameError: {error}")
        return
    rank.log(step=0, built="yes", weights=model.head.weight.numel())
    for name, size in (("first", p.size), ("other", p.other)):
        x = torch.randn(2, 3, size, size, device=rank.device)
        try:
            said = "fits" if model(x).shape == (2, CLASSES) else "has another shape"
        except RuntimeError as error:
            said = str(error)
        rank.log(step=0, phase=name, said=said)
    residual, y = model.features[2], torch.randn(1, 8, 4, 4, device=rank.device)
    rank.log(step=0, adds=int(torch.equal(residual(y), y + residual.inner(y))))


def another_size(p: Any, ranks: int) -> list[str]:
    """Refuse two sizes that are one behind the pooling: nothing could mismatch."""
    same = p.other // 2 == p.size // 2
    return [f"two equal sizes show nothing; type scenario.other={p.size + 16}"] if same else []


def fits(t: Tables, arm: str, image: str) -> Finding:
    """Decide: the network of the arm is built and takes this image."""
    t.require(arm)
    built = t.value(arm, "built", step=0)
    said = t.value(arm, "said", step=0, phase=image) if built == "yes" else built
    reason = f"{arm}, {image} size: {said}"
    return (holds if said == "fits" else refuted)(reason)


@symptom(REFUTED, settles="B23")
def template_works(t: Tables) -> Finding:
    """The template works as it is printed."""
    return fits(t, "as_printed", "first")


@remedy(REFUTED, settles="B24")
def computed_size_fits(t: Tables) -> Finding:
    """Computing the size of the fully connected layer avoids size mismatches."""
    return all_of(fits(t, "computed", "first"), fits(t, "computed", "other"))


@remedy(HOLDS)
def pooling_fits(t: Tables) -> Finding:
    """Adaptive pooling in front of the head avoids them."""
    return all_of(fits(t, "pooled", "first"), fits(t, "pooled", "other"))


@mechanism(REFUTED, settles="B22")
def sequential_has_no_residual(t: Tables) -> Finding:
    """An nn.Sequential cannot express a residual connection, not even by a module inside it."""
    return negated(counts(t, "pooled", "adds", 1, "residual that adds its input, in a Sequential"))


SCENARIO = Scenario(
    title="A fully connected layer of computed size fits one image size, and raises at others",
    family="initial state",
    cause="",
    params=Params,
    run=run,
    check=another_size,
    min_ranks=1,
    differs=("network",),
    headline=says(
        template_works=("the template works", "the template raises NameError"),
        computed_size_fits=("a computed size fits all", "a computed size fits one"),
    ),
    arms=(
        reference("pooled", "AdaptiveAvgPool2d", ranks=1, head="pooled"),
        faulty("as_printed", "as printed", ranks=1, head="as_printed"),
        faulty("computed", "size computed", ranks=1, head="computed"),
    ),
    claims=(template_works, computed_size_fits, pooling_fits, sequential_has_no_residual),
)
