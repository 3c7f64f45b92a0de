"""A model built on the meta device loses its weight tying: embedding and output go their own ways.

The constructor gives the output layer the embedding's Parameter. `to_empty` then makes a new tensor
for each name, and two Parameters are left. A checkpoint of the tied model fills both with the same
values, so the first loss is right; from then on each is trained with its own half of the gradient.
All ranks do so alike, and a comparison of ranks finds nothing. Reported in
facebookresearch/lingua#75, verl-project/verl#7834, huggingface/accelerate#3154.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

WIDTH = 6


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/tie_broken.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    vocabulary: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Load a tied model and train it; what is done about the tie after to_empty differs."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def tied() -> nn.Sequential:
        into = nn.Embedding(p.vocabulary, WIDTH, dtype=torch.float64)
        out = nn.Linear(WIDTH, p.vocabulary, bias=False, dtype=torch.float64)
        out.weight = into.weight
        return nn.Sequential(into, nn.Tanh(), out)

    draw = rank.generator("tokens")
    checkpoint = tied().state_dict()
    checkpoint["0.weight"].normal_(generator=draw)
    ids = torch.randint(p.vocabulary, (p.batch, 2), generator=draw)
    tokens, targets = rank.shard(ids[rank.permutation(p.batch)]).to(rank.device).unbind(dim=1)
    with torch.device("meta" if arm["on_meta"] else rank.device):
        layers = tied()
    if arm["on_meta"]:
        layers.to_empty(device=rank.device)
    if arm.get("ties_again"):
        layers[2].weight = layers[0].weight
    layers.load_state_dict(checkpoint)
    into, out = (layers.get_parameter(f"{place}.weight") for place in (0, 2))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), targets)
        loss.backward()
        if arm.get("shares") == "gradients":
            assert into.grad is not None
            assert out.grad is not None
            into.grad = out.grad = into.grad + out.grad
        optimizer.step()
        if arm.get("shares") == "weights":
            with torch.no_grad():
                out.copy_(into.copy_((into + out) / 2))
        rank.log(step=step, loss=loss)
        rank.digest(step=step, into=into, out=out)
        rank.snapshot(step=step, weights=torch.cat([into, out]))


@symptom(HOLDS, source="facebookresearch/lingua#75")
def off_track(t: Tables) -> Finding:
    """Built on the meta device all ranks train to the same weights, not those of a tied model."""
    off = negated(matches(t, "untied", "one_process", "weights"))
    return all_of(off, ranks_agree(t, "untied", "weights"))


@symptom(REFUTED)
def first_loss(t: Tables) -> Finding:
    """The first loss after loading shows that the tie is gone."""
    arms = ("untied", "tied_again")
    t.require(*arms)
    lost, whole = ([t.value(a, "loss", step=0, rank=r) for r in t.ranks(a)] for a in arms)
    if lost == whole:
        return refuted(f"the first loss is exactly that of the tied model, {lost[0]:.4g}")
    return holds(f"the first loss is {lost[0]:.4g}, that of the tied model {whole[0]:.4g}")


@remedy(REFUTED)
def loading_ties(t: Tables) -> Finding:
    """Loading a checkpoint of the tied model ties the two again."""
    t.require("untied")
    into, out = (t.series("untied", f"{name}.digest") for name in ("into", "out"))
    parted = [step for step in into if into[step] != out[step]]
    reason = f"embedding and output differ after updates {parted or 'none'} of {len(into)}"
    return (refuted if parted else holds)(reason)


@remedy(REFUTED)
def averaging(t: Tables) -> Finding:
    """Averaging the two after each update is as good as tying them."""
    return matches(t, "averaged", "one_process", "weights")


@remedy(HOLDS, source="huggingface/accelerate#3154")
def tie_again(t: Tables) -> Finding:
    """Tie them again after to_empty, before wrapping: N ranks train like one process."""
    return like_one_process(t, "tied_again")


@remedy(HOLDS)
def summing(t: Tables) -> Finding:
    """Adding the two gradients up in both gives the tied model's weights."""
    return like_one_process(t, "summed")


SCENARIO = Scenario(
    title="A tied model built on the meta device comes out untied; its first loss looks right",
    family="initial state",
    cause="tie_broken",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        off_track=("to_empty unties embedding and output", "to_empty keeps the tie"),
        first_loss=("the first loss shows it", "the first loss looks right"),
        loading_ties=("loading ties them again", "loading does not tie them again"),
        averaging=("averaging them helps", "averaging them is half a step"),
    ),
    arms=(
        one_process("one process, tied", on_meta=False),
        faulty("untied", "meta device, to_empty, load", on_meta=True),
        faulty("averaged", "both averaged after an update", on_meta=True, shares="weights"),
        fixed("tied_again", "tied after to_empty", on_meta=True, ties_again=True),
        fixed("summed", "the gradients of both added up", on_meta=True, shares="gradients"),
    ),
    claims=(off_track, first_loss, loading_ties, averaging, tie_again, summing),
)
