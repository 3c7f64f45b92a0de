"""A dummy input kept as a buffer: sent to all ranks at every forward, and into the statistics.

A constructor that pushes zeros through its convolutions learns how wide the head has to be. Kept
with register_buffer the zeros (602,112 bytes for 3 x 224 x 224) go into every checkpoint and, under
DDP, from rank 0 to all others at the beginning of every forward. And the probe itself is a forward
in train mode: batch norm takes the zeros in as its first batch. On one GPU nothing of it shows.
From an article that recommends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, cost, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, negated, repeats_records, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted
from harness.tables import relative_l2
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/dummy_input_buffer.yaml."""

    steps: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    side: int = field(metadata=at_least(32))
    momentum: float = field(metadata=between(0.01, 1.0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Build a small net and train it; how the width of its head is found out differs."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from harness.collectives import count_collectives

    norm: Any = nn.BatchNorm2d(4, momentum=p.momentum)
    conv: Any = nn.Conv2d(3, 4, 16, stride=16)
    layers = nn.Sequential(conv, norm, nn.Flatten()).to(rank.device)
    width = 4 * (p.side // 16) ** 2
    zeros = torch.zeros(1, 3, p.side, p.side, device=rank.device)
    if arm["probe"] == "buffer":
        layers.register_buffer("dummy", zeros, persistent=arm["persistent"])
        width = layers(layers.dummy).shape[1]
    if arm["probe"] == "local":
        width = layers.eval()(zeros).shape[1]
        layers.train()
    rank.log(step=0, width=width, tracked=norm.num_batches_tracked)
    rank.snapshot(step=0, mean=norm.running_mean, var=norm.running_var, bias=conv.bias)
    layers.append(nn.Linear(width, 1).to(rank.device))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draw = rank.generator("images")
    images = rank.shard(torch.randn(p.batch, 3, p.side, p.side, generator=draw)).to(rank.device)
    for step in range(p.steps):
        optimizer.zero_grad()
        with count_collectives() as calls:
            output = model(images)
        output.square().mean().backward()
        optimizer.step()
        rank.log(step=step, bytes=calls.bytes("broadcast"))
    state = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    rank.log(step=p.steps, checkpoint=state)


def more(t: Tables, arm: str, metric: str) -> Finding:
    """Say whether something is larger than without the buffer, always, by just its bytes."""
    t.require(arm, "computed")
    due = 3 * 4 * t.root_params["side"] ** 2
    without = t.series("computed", metric)
    ranks = [t.series(arm, metric, rank=rank) for rank in t.ranks(arm)]
    extra = {value - without[step] for series in ranks for step, value in series.items()}
    reason = f"{metric} of {arm}: {sorted(extra)} bytes more than without; the dummy has {due}"
    return (holds if extra == {due} else refuted)(reason, effect=float(max(extra)), unit="bytes")


@symptom(REFUTED, settles="B25")
def harmless(t: Tables) -> Finding:
    """A dummy-input buffer is harmless: training begins as without it."""
    names = ("mean", "var", "tracked")
    return all_of(*(repeats_records(t, "buffer", "computed", name) for name in names))


@remedy(HOLDS, settles="B25")
def useful(t: Tables) -> Finding:
    """It is useful: the width of the head comes out right."""
    return repeats_records(t, "buffer", "computed", "width")


@mechanism(HOLDS)
def zeros_are_a_batch(t: Tables) -> Finding:
    """The zeros are batch norm's first batch: a mean of momentum * bias, a variance of 1 - it."""
    t.require("buffer")
    momentum = t.root_params["momentum"]
    mean, var, bias = (t.snapshot("buffer", name, step=0) for name in ("mean", "var", "bias"))
    gap = max(relative_l2(mean, momentum * bias), relative_l2(var, 0 * var + 1 - momentum))
    reason = f"the statistics before training are those of one batch of zeros, to {gap:.2g}"
    return is_rounding(gap, dtype_floor(EPS["float32"]), reason, "relative L2 distance")


@cost(HOLDS, settles="B25")
def sent_and_saved(t: Tables) -> Finding:
    """DDP sends it from rank 0 to all ranks at every forward, and every checkpoint holds it."""
    return all_of(more(t, "buffer", "bytes"), more(t, "buffer", "checkpoint"))


@remedy(REFUTED)
def persistent_false(t: Tables) -> Finding:
    """With persistent=False it is not sent any more."""
    return negated(more(t, "not_persistent", "bytes"))


@remedy(HOLDS)
def local_tensor(t: Tables) -> Finding:
    """Zeros that are no buffer, in eval mode: begins, sends and saves as without a probe."""
    names = ("mean", "var", "tracked", "bytes", "checkpoint")
    return all_of(*(repeats_records(t, "local", "computed", name) for name in names))


SCENARIO = Scenario(
    title="A dummy input kept as a buffer: sent at every forward, saved, and taken in as a batch",
    family="buffers",
    cause="",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        harmless=("a dummy-input buffer is harmless", "a dummy input moves the statistics"),
        useful=("it gives the width", "it gives a wrong width"),
        sent_and_saved=("it is sent at every forward", "it is not sent"),
        persistent_false=("persistent=False prevents that", "persistent or not"),
    ),
    arms=(
        reference("computed", "the width is computed", probe="none"),
        faulty("buffer", "zeros in a buffer", probe="buffer", persistent=True),
        faulty("not_persistent", "persistent=False", probe="buffer", persistent=False),
        fixed("local", "local zeros, in eval mode", probe="local"),
    ),
    claims=(harmless, useful, zeros_are_a_batch, sent_and_saved, persistent_false, local_tensor),
)
