"""Reentrant checkpoints under DDP: a gradient that is ready twice, or is averaged only in part.

A reentrant checkpoint makes a backward pass of its own inside backward. With find_unused_parameters
the reducer has finished the layer's gradient before it comes, and raises. Where the net's first
layer is used outside as well, as where a net recycles its output, it is through before the rest of
the gradient comes: no error, and each rank adds its own part. pytorch/pytorch#46166.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/ready_twice.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a net with a checkpointed layer; how it is checkpointed, and used, differs."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    from scenarios._models import FEATURES, gradients, mlp, rows, weights

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            draw = rank.generator("net")
            self.block, own = (mlp((FEATURES, FEATURES), generator=draw) for _ in range(2))
            self.first = self.block if arm["shared"] else own
            self.head = mlp((FEATURES, 1), generator=draw)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.first(x).tanh()
            if arm["reentrant"] is None:
                return self.head(self.block(hidden).tanh())
            return self.head(checkpoint(self.block, hidden, use_reentrant=arm["reentrant"]).tanh())

    told: dict[str, Any] = {arm["told"]: True} if arm.get("told") else {}
    model = DistributedDataParallel(Net().to(rank.device), **told)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        try:
            torch.nn.functional.mse_loss(model(x), y).backward()
        except RuntimeError as error:
            rank.log(step=step, error=str(error).partition(". ")[0])
            return
        optimizer.step()
        rank.log(step=step, error="")
        rank.snapshot(step=step, gradients=gradients(model), weights=weights(model))


def right(t: Tables, arm: str) -> Finding:
    """Say whether all ranks of the arm end with the weights of one process."""
    reference = "one_process_shared" if "shared" in arm else "one_process"
    return all_of(matches(t, arm, reference, "weights"), ranks_agree(t, arm, "weights"))


def raises(t: Tables, arm: str) -> Finding:
    """Say whether the reducer complains on every rank, in the first backward."""
    t.require(arm)
    said = [t.value(arm, "error", step=0, rank=rank) for rank in t.ranks(arm)]
    failed = sum("ready only once" in error for error in said)
    reason = f"{arm}: backward raises on {failed} of {len(said)} ranks: {said[0] or 'nothing'}"
    return (holds if failed == len(said) else refuted)(reason, effect=float(failed), unit="ranks")


@symptom(HOLDS, source="pytorch/pytorch#46166")
def flag_raises(t: Tables) -> Finding:
    """With find_unused_parameters=True the first backward raises on every rank."""
    return raises(t, "flag")


@mechanism(HOLDS)
def needs_the_flag(t: Tables) -> Finding:
    """Without the flag the same checkpoint does no harm: N ranks train like one process."""
    return right(t, "no_flag")


@symptom(HOLDS)
def silent(t: Tables) -> Finding:
    """If the layer is used outside as well nothing is raised, and the ranks' gradients differ."""
    return all_of(negated(raises(t, "shared")), negated(ranks_agree(t, "shared", "gradients")))


@mechanism(REFUTED)
def sharing_is_enough(t: Tables) -> Finding:
    """Sharing the layer is enough for that, without a checkpoint."""
    return negated(right(t, "shared_plain"))


@remedy(HOLDS, source="huggingface/accelerate#3536")
def not_reentrant(t: Tables) -> Finding:
    """use_reentrant=False mends both: N ranks train like one process."""
    return all_of(right(t, "not_reentrant"), right(t, "not_reentrant_shared"))


@remedy(HOLDS)
def static_graph(t: Tables) -> Finding:
    """static_graph=True mends the silent one: the same."""
    return right(t, "static_shared")


FLAG = "find_unused_parameters"
SCENARIO = Scenario(
    title="Reentrant checkpoints under DDP: ready twice, or averaged only in part without a word",
    family="synchronisation",
    cause="ready_twice",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        flag_raises=("a reentrant checkpoint with the flag raises", "the flag does no harm"),
        silent=("with a shared layer ranks part in silence", "a shared layer raises or is right"),
        not_reentrant=("use_reentrant=False mends both", "use_reentrant=False does not mend it"),
    ),
    arms=(
        one_process("one process", reentrant=None, shared=False),
        one_process("one, shared", name="one_process_shared", reentrant=None, shared=True),
        faulty("flag", "with the flag", reentrant=True, shared=False, told=FLAG),
        faulty("shared", "used outside as well", reentrant=True, shared=True),
        control("no_flag", "without the flag", reentrant=True, shared=False),
        control("shared_plain", "shared, no checkpoint", reentrant=None, shared=True),
        fixed("not_reentrant", "use_reentrant=False", reentrant=False, shared=False, told=FLAG),
        fixed("not_reentrant_shared", "and shared", reentrant=False, shared=True),
        fixed("static_shared", "flag", reentrant=True, shared=True, told="static_graph"),
    ),
    claims=(flag_raises, needs_the_flag, silent, sharing_is_enough, not_reentrant, static_graph),
)
