"""Recomputed layers that are all fed the chunk's input: forward is right, gradients are not.

To save memory a chunk of layers keeps only its input and is run again in backward. Every layer but
the first then needs the output of the one before it. Fed the chunk's input, each layer computes the
gradient of a network that does not exist. The loss, and the gradient of all above the chunk, are
right to the last bit, the ranks average the same wrong gradient, and with one layer to a chunk
nothing is wrong at all. Reported in NVIDIA/Megatron-LM#290.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, matches, negated, ranks_agree, same_by_rank, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/recompute_wrong_input.yaml."""

    steps: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    layers: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a few layers that are recomputed in backward; what each is fed then differs."""
    import torch
    import torch.distributed as dist

    from scenarios._models import FEATURES, gradients, mlp, rows, weights
    from scenarios._pipeline import Residual

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, chunk: Any, *parameters: torch.Tensor) -> Any:
            ctx.x, ctx.chunk = x.detach(), chunk
            return chunk(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            given = [ctx.x]
            for layer in ctx.chunk[:-1]:
                given.append(layer(given[-1]) if arm["fed"] == "own input" else ctx.x)
            (gradient,), of_parameters = gradients, list[Any]()
            for layer, x in zip(reversed(ctx.chunk), reversed(given), strict=True):
                with torch.enable_grad():
                    x = x.detach().requires_grad_()
                    output = layer(x)
                gradient, *own = torch.autograd.grad(output, (x, *layer.parameters()), gradient)
                of_parameters = [*own, *of_parameters]
            return gradient, None, *of_parameters

    draw = rank.generator("net")
    body = torch.nn.Sequential(*(Residual(generator=draw) for _ in range(p.layers)))
    head = mlp((FEATURES, 1), generator=draw)
    net = torch.nn.Sequential(body, head).to(rank.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    recomputed: Any = Recomputed.apply
    size = 1 if arm["chunks"] == "one layer" else p.layers
    for step in range(p.steps):
        optimizer.zero_grad()
        hidden = x
        for first in range(0, p.layers, size):
            chunk = body[first : first + size]
            if arm["fed"] == "kept":
                hidden = chunk(hidden)
            else:
                hidden = recomputed(hidden, chunk, *chunk.parameters())
        loss = torch.nn.functional.mse_loss(head(hidden), y)
        loss.backward()
        for gradient in (q.grad for q in net.parameters() if q.grad is not None):
            dist.all_reduce(gradient)
            gradient /= rank.world_size
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, head=gradients(head), body=gradients(body))
        optimizer.step()
        rank.snapshot(step=step, weights=weights(net))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#290")
def chunk_is_off(t: Tables) -> Finding:
    """With every layer fed the chunk's input the first gradient of the chunk is off."""
    return negated(matches(t, "chunk_input", "one_process", "body", step=0))


@mechanism(HOLDS)
def above_is_right(t: Tables) -> Finding:
    """The first gradient of what stands above the chunk is right."""
    return matches(t, "chunk_input", "one_process", "head", step=0)


@symptom(REFUTED)
def loss_shows_it(t: Tables) -> Finding:
    """The first loss is another one than with the right recomputation."""
    return negated(same_by_rank(t, "chunk_input", "own_input", "loss"))


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "chunk_input", "weights"))


@remedy(HOLDS)
def one_layer(t: Tables) -> Finding:
    """With one layer to a chunk the same code trains like one process."""
    return like_one_process(t, "one_layer")


@remedy(HOLDS, source="NVIDIA/Megatron-LM#290")
def own_input(t: Tables) -> Finding:
    """Each layer fed the output of the one before it, the ranks train like one process."""
    return like_one_process(t, "own_input")


SCENARIO = Scenario(
    title="Recomputed layers all fed the chunk's input: right losses, wrong gradients",
    family="gradients",
    cause="recompute_wrong_input",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        chunk_is_off=("the chunk's gradient is off", "the chunk's gradient is right"),
        loss_shows_it=("the loss shows it", "the first loss is right"),
        ranks_part=("the ranks part", "the ranks agree"),
        one_layer=("one layer to a chunk is right", "even with one layer to a chunk"),
    ),
    arms=(
        one_process("one process, all kept", fed="kept", chunks="all layers"),
        faulty("chunk_input", "each layer, the chunk's", fed="chunk's input", chunks="all layers"),
        fixed("own_input", "each layer, its own", fed="own input", chunks="all layers"),
        fixed("one_layer", "a chunk each", fed="chunk's input", chunks="one layer"),
    ),
    claims=(chunk_is_off, above_is_right, loss_shows_it, ranks_part, one_layer, own_input),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
