"""Layers divided among pipeline stages by a whole number: the rest is dropped, or comes twice.

With 11 layers on 4 stages `layers // stages` gives each stage 2, and 3 layers belong to none. If
sizes are rounded up and starting points down, neighbours overlap, and a layer is run, and trained,
on two stages. Any number of residual layers fits together: the loss falls, no shape is wrong, and
which layers are missing only a census says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/pipeline_stage_division.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    layers: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """There has to be a layer for each stage, and a rest."""
    if p.layers > ranks and p.layers % ranks:
        return []
    typed = max(1, p.layers // ranks) * ranks + 1
    return [f"{p.layers} layers have no rest over {ranks} stages; type scenario.layers={typed}"]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train layers in stages that hand activations on; which layers a stage takes differs."""
    import torch

    from scenarios._models import FEATURES, mlp, rows
    from scenarios._pipeline import Residual, through_stages

    draw, stages, stage = rank.generator("net"), rank.world_size, rank.rank
    each = p.layers // stages
    first, end = stage * each, (stage + 1) * each
    if arm["divides"] == "rest to the last" and stage == stages - 1:
        end = p.layers
    elif arm["divides"] == "evenly":
        first, end = stage * p.layers // stages, (stage + 1) * p.layers // stages
    elif arm["divides"] == "rounded up":
        first = stage * p.layers // stages
        end = first + each + 1
    layers = [Residual(generator=draw).to(rank.device) for _ in range(p.layers)]
    head = mlp((FEATURES, 1), generator=draw).to(rank.device)
    mine = torch.nn.Sequential(*layers[first:end], *[head][: stage == stages - 1])
    optimizer = torch.optim.SGD(mine.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch, whole=True)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = through_stages(mine, x, partial(torch.nn.functional.mse_loss, target=y))
        optimizer.step()
        rank.log(step=step, reported=loss, first=first, end=end)
        rank.snapshot(step=step, loss=loss[None])


def layers_of(t: Tables, arm: str) -> list[int]:
    """Return how many stages run each layer."""
    t.require(arm)
    ends = [[t.value(arm, name, step=0, rank=r) for name in ("first", "end")] for r in t.ranks(arm)]
    return [sum(a <= n < b for a, b in ends) for n in range(t.root_params["layers"])]


@mechanism(HOLDS)
def dropped(t: Tables) -> Finding:
    """Divided by a whole number, the remainder's layers are on no stage."""
    times = layers_of(t, "dropped")
    missing = [number for number, count in enumerate(times) if count == 0]
    rest = len(times) % len(t.ranks("dropped"))
    decide = holds if len(missing) == rest and max(times) == 1 else refuted
    return decide(f"layers {missing} of {len(times)} are on no stage", effect=float(len(missing)))


@mechanism(HOLDS)
def repeated(t: Tables) -> Finding:
    """Rounded up, layers between two stages are run on both."""
    times = layers_of(t, "repeated")
    twice = [number for number, count in enumerate(times) if count == 2]
    decide = holds if twice and min(times) == 1 else refuted
    return decide(f"layers {twice} of {len(times)} are on two stages", effect=float(len(twice)))


@symptom(HOLDS)
def off_one_process(t: Tables) -> Finding:
    """Either way another network is trained than in one process."""
    found = (matches(t, arm, "one_process", "loss") for arm in ("dropped", "repeated"))
    return all_of(*map(negated, found))


@symptom(REFUTED)
def loss_tells(t: Tables) -> Finding:
    """The loss tells: it does not fall."""
    arms = ("dropped", "repeated", "one_process")
    t.require(*arms)
    losses = {arm: list(t.series(arm, "reported").values()) for arm in arms}
    stuck = [arm for arm, loss in losses.items() if not loss[-1] < loss[0]]
    said = ", ".join(f"{arm} {loss[0]:.3g} to {loss[-1]:.3g}" for arm, loss in losses.items())
    return (holds if stuck else refuted)(f"losses go from and to: {said}")


@remedy(HOLDS)
def evenly(t: Tables) -> Finding:
    """With both ends of a stage rounded alike the stages are one process."""
    return like_one_process(t, "evenly", "loss")


@remedy(HOLDS)
def rest_to_the_last(t: Tables) -> Finding:
    """With the remainder on the last stage they are, too."""
    return like_one_process(t, "rest_to_the_last", "loss")


SCENARIO = Scenario(
    title="Layers that do not divide by the stages: some are on no stage, or on two",
    family="parallel layouts",
    cause="pipeline_stage_division",
    params=Params,
    run=run,
    check=check,
    headline=says(
        dropped=("layers // stages drops the remainder", "layers // stages drops nothing"),
        repeated=("rounding up repeats layers", "rounding up repeats nothing"),
        loss_tells=("the loss does not fall", "the loss falls all the same"),
    ),
    arms=(
        one_process("one process, all layers", divides="evenly"),
        faulty("dropped", "layers // stages each", divides="whole number"),
        faulty("repeated", "start rounded down, size up", divides="rounded up"),
        fixed("evenly", "start and end rounded down", divides="evenly"),
        fixed("rest_to_the_last", "the rest to the last", divides="rest to the last"),
    ),
    claims=(dropped, repeated, off_one_process, loss_tells, evenly, rest_to_the_last),
)
