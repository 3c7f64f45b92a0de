"""Clipping layer by layer: on local shards it clips shards, and it turns the gradient anyway.

An article clips each layer, or each row, by its own norm, so that local shocks are kept. Inside of
a layer they are; between layers that is what is lost: all that exceeds the bound comes out equally
long. And what a rank of FSDP2 holds is a shard. Clipped as if it were a layer, each is as long as
the layer was to be, which ends up sqrt(N) times too long. DTensors know that they are shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, like_one_process, matches, negated, says
from harness.floor import dtype_floor
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Scenario, at_least, unknown
from harness.tables import relative_l2
from scenarios._models import FEATURES, split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/layer_clip_sharded.yaml."""

    steps: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    hidden: int = field(metadata=at_least(1))
    bound: float = field(metadata=at_least(1e-6))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a small net; what each clip is given, and what it takes for a layer, differs."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import gradients, mlp, rows

    net: Any = mlp((FEATURES, p.hidden, 8, 1), generator=rank.generator("net")).to(rank.device)
    model: Any = fully_shard(net) if arm["wrap"] == "fsdp2" else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        rank.snapshot(step=step, raw=gradients(net))
        for layer in net.parameters():
            if arm.get("of") == "shards":
                whole, layer = layer, layer.detach().to_local()
                layer.grad = whole.grad.to_local()
            if arm["clips"] == "layers":
                torch.nn.utils.clip_grad_norm_([layer], p.bound)
            else:
                row = layer.grad if layer.dim() > 1 else layer.grad[:, None]
                row *= (p.bound / (row.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        optimizer.step()
        rank.snapshot(step=step, clipped=gradients(net))


def straight(t: Tables, arm: str, size: int | None = None) -> Finding:
    """Decide: the clip shortens the gradient, or its first numbers, and does not turn it."""
    t.require(arm)
    raw, clipped = (t.snapshot(arm, name, step=0)[:size] for name in ("raw", "clipped"))
    left = float(clipped @ clipped / (raw @ raw)) ** 0.5
    if left > 0.99:
        return unknown(f"scenario.bound={t.root_params['bound']} cuts nothing; type a smaller one")
    cosine = raw @ clipped / (raw @ raw) / left
    reason = f"{arm}: cosine {cosine:.4g} to the gradient as it was, {left:.2g} of its length"
    floor = rounding(t, arm, "clipped", step=0)
    return is_rounding(relative_l2(clipped / left, raw), floor, reason, "distance in direction")


@symptom(HOLDS, settles="A66")
def in_layer(t: Tables) -> Finding:
    """Clipping layer by layer keeps local shocks: inside of a layer nothing is turned."""
    return straight(t, "one_process", FEATURES * t.root_params["hidden"])


@mechanism(REFUTED, settles="A66")
def beside_others(t: Tables) -> Finding:
    """Clipped by layer, or by row, a shock stays as strong as it was beside the others."""
    return negated(all_of(*(negated(straight(t, arm)) for arm in ("one_process", "rows_alone"))))


@symptom(REFUTED, settles="A66")
def shards_are_layers(t: Tables) -> Finding:
    """Clipping the shards that a rank of FSDP2 holds is clipping the layers."""
    return matches(t, "shards", "one_process", "clipped", step=0)


@mechanism(HOLDS)
def sqrt_n_too_long(t: Tables) -> Finding:
    """Each shard comes out as long as the bound, and the layer sqrt(N) times as long."""
    t.require("shards")
    size, bound = FEATURES * t.root_params["hidden"], t.root_params["bound"]
    raw, clipped = (t.snapshot("shards", name, step=0)[:size] for name in ("raw", "clipped"))
    shards = raw.reshape(len(t.ranks("shards")), -1)
    smallest = (shards**2).sum(axis=1).min() ** 0.5
    if smallest <= bound:
        return unknown(f"scenario.bound={bound} does not cut every shard; type a smaller one")
    ratio = float(clipped @ clipped) ** 0.5 / bound
    reason = f"clipped, the first layer is {ratio:.5g} bounds long on {len(shards)} ranks"
    # torch divides by the norm plus 1e-6: what comes out falls short of the bound by that.
    floor = dtype_floor(1e-6 / smallest)
    return is_rounding(abs(ratio / len(shards) ** 0.5 - 1), floor, reason, "relative error")


@remedy(HOLDS, settles="A66", before={"2.10": REFUTED})
def dtensors(t: Tables) -> Finding:
    """Given DDP's layers, or FSDP2's DTensors, the clip is that of one process."""
    return all_of(*(like_one_process(t, arm, "clipped") for arm in ("fsdp2", "ddp")))


@remedy(HOLDS)
def local_rows(t: Tables) -> Finding:
    """Clipped row by row, local shards are right: FSDP2 shards between rows."""
    return matches(t, "shard_rows", "rows_alone", "clipped")


SCENARIO = Scenario(
    title="Clipping layer by layer turns the gradient, and on FSDP2's shards it clips shards",
    family="clipping",
    cause="clip_norm_of_shards",
    params=Params,
    run=run,
    check=split_equally("batch", "hidden"),
    headline=says(
        beside_others=("layer clips keep the direction", "layer clips turn the gradient"),
        shards_are_layers=("shards may be clipped as layers", "shards are no layers"),
        sqrt_n_too_long=("clipped, N of them are sqrt(N) too long", "by no simple factor"),
    ),
    arms=(
        one_process("one process, each layer", wrap="ddp", clips="layers"),
        one_process("one process, each row", name="rows_alone", wrap="ddp", clips="rows"),
        faulty("shards", "FSDP2, each local shard", wrap="fsdp2", clips="layers", of="shards"),
        fixed("fsdp2", "FSDP2, each DTensor", wrap="fsdp2", clips="layers"),
        fixed("ddp", "DDP, each layer", wrap="ddp", clips="layers"),
        fixed("shard_rows", "FSDP2, each local row", wrap="fsdp2", clips="rows", of="shards"),
    ),
    claims=(in_layer, beside_others, shards_are_layers, sqrt_n_too_long, dtensors, local_rows),
)
