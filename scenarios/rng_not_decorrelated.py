"""One seed on every rank: dropout draws the same masks everywhere, and an update sees 1/N of them.

A script seeds all ranks alike, so that they build the same model, and leaves it at that. Row k of
every rank then loses the same units, in every update, and the average over ranks does not average
masks. Weights are equal on all ranks, with one seed as with many, so no comparison of them tells.
What it costs in quality is not measured here. Reported in huggingface/transformers#31412,
facebookresearch/fastMRI#123; asked in ByteDance-Seed/VeOmni#143, facebookresearch/detr#297.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/rng_not_decorrelated.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    units: int = field(metadata=at_least(64))
    dropout: float = field(metadata=between(0.25, 0.75))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a net with dropout; what the ranks' generators are seeded with differs."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import FEATURES, rows, weights

    torch.manual_seed(rank.seed + (rank.rank if arm["adds_rank"] == "first" else 0))
    into = nn.Linear(FEATURES, p.units, dtype=torch.float64)
    out = nn.Linear(p.units, 1, dtype=torch.float64)
    dropout = nn.Dropout(p.dropout)
    layers = nn.Sequential(into, nn.Tanh(), dropout, out).to(rank.device)
    kept: list[torch.Tensor] = []
    dropout.register_forward_hook(lambda module, args, output: kept.append(output != 0.0))
    model = DistributedDataParallel(layers)
    if arm["adds_rank"] == "after wrapping":
        torch.manual_seed(rank.seed + rank.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        masks = ["".join(map(str, row)) for row in kept.pop().int().tolist()]
        rank.log(step=step, masks=" ".join(f"{int(mask, 2):x}" for mask in masks))
        rank.digest(step=step, weights=weights(model))


def masks_an_update(t: Tables, arm: str) -> list[int]:
    """Return for each update how many different masks the rows of all ranks were given."""
    t.require(arm)
    drawn = [t.series(arm, "masks", rank=rank) for rank in t.ranks(arm)]
    return [len({mask for masks in drawn for mask in masks[step].split()}) for step in drawn[0]]


def as_many_masks(t: Tables, arm: str) -> Finding:
    """Say whether each update of the arm sees as many masks as one of one process, one a row."""
    found, due = masks_an_update(t, arm), masks_an_update(t, "one_process")
    reason = f"{arm}: {min(found)} masks in an update, one process with the same rows {min(due)}"
    numbers = {"effect": float(min(found)), "unit": f"masks an update, of {min(due)}"}
    return (holds if found == due else refuted)(reason, **numbers)


@symptom(HOLDS, source="huggingface/transformers#31412", settles="~B20")
def same_masks(t: Tables) -> Finding:
    """With one seed all ranks draw the same masks in every update."""
    return ranks_agree(t, "one_seed", "masks")


@mechanism(HOLDS)
def share_of_masks(t: Tables) -> Finding:
    """An update of N ranks then sees exactly 1/N of the masks of one process."""
    found, ranks = masks_an_update(t, "one_seed"), len(t.ranks("one_seed"))
    due = [masks / ranks for masks in masks_an_update(t, "one_process")]
    reason = f"an update of {ranks} ranks sees {min(found)} masks, 1/{ranks} would be {min(due):g}"
    return (holds if found == due else refuted)(reason, effect=float(min(found)), unit="masks")


@symptom(REFUTED)
def weights_show_it(t: Tables) -> Finding:
    """Comparing the ranks' weights finds it."""
    return negated(ranks_agree(t, "one_seed", "weights"))


@mechanism(REFUTED)
def one_seed_needed(t: Tables) -> Finding:
    """DDP needs one seed: with a seed per rank the replicas part."""
    arms = ("rank_added", "rank_added_first")
    return negated(all_of(*(ranks_agree(t, arm, "weights") for arm in arms)))


@remedy(HOLDS, source="facebookresearch/detr#297")
def add_rank(t: Tables) -> Finding:
    """Seed with seed + rank after wrapping: as many masks as one process draws."""
    return as_many_masks(t, "rank_added")


@remedy(HOLDS)
def add_rank_first(t: Tables) -> Finding:
    """Seeding so before the model is built does as well: DDP hands out rank 0's weights."""
    return as_many_masks(t, "rank_added_first")


SCENARIO = Scenario(
    title="One seed on every rank: dropout masks are the same, an update sees 1/N of them",
    family="random numbers",
    cause="rng_not_decorrelated",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        same_masks=("one seed gives all ranks the same masks", "the masks differ all the same"),
        weights_show_it=("the weights show it", "the weights do not show it"),
        one_seed_needed=("seeds per rank part the replicas", "seeds per rank part nothing"),
        add_rank=("and give as many masks as one process", "and do not give more masks"),
    ),
    arms=(
        reference("one_process", "one process", ranks=1, adds_rank="never"),
        faulty("one_seed", "manual_seed(seed)", adds_rank="never"),
        fixed("rank_added", "manual_seed(seed + rank) after DDP", adds_rank="after wrapping"),
        fixed("rank_added_first", "the same before the model is built", adds_rank="first"),
    ),
    claims=(same_masks, share_of_masks, weights_show_it, one_seed_needed, add_rank, add_rank_first),
)
