"""A clip that scales what it counted: replicas of other ranks than the first keep their gradient.

Over tensor-parallel ranks the norm takes the parts of all, and replicas from rank 0 only. That is
right; whoever filters the list of gradients once, and then scales what is left in it, scales the
replicas on rank 0 alone. The norm that is logged is right, nothing happens as long as it stays
below the bound, and the first clip that acts makes the replicas part. Reported in
deepspeedai/DeepSpeed#1801. torch's own clip knows of no other ranks: there, all of them part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least
from scenarios._models import split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/clip_skips_replicas.yaml."""

    steps: int = field(metadata=at_least(2))
    tokens: int = field(metadata=at_least(2))
    hidden: int = field(metadata=at_least(2))
    bound: float = field(metadata=at_least(1e-6))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train norm -> split linear -> tanh -> split linear; what the clip scales differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.utils import clip_grad_norm_

    from scenarios import _tensor_parallel as split
    from scenarios._models import rows, weights

    norm, into, out = split.layers(rank, p.hidden)
    bound = p.bound if arm.get("acts", True) else 1e6 * p.bound
    optimizer = torch.optim.SGD([into, out, *norm.parameters()], lr=p.lr)
    x, y = rows(rank, p.tokens, whole=True)
    for step in range(p.steps):
        optimizer.zero_grad()
        hidden = torch.tanh(split.copied(norm(x)) @ into.T)
        torch.nn.functional.mse_loss(split.summed(hidden @ out), y.expand_as(x)).backward()
        shares = [q.grad for q in (into, out) if q.grad is not None]
        replicas = [q.grad for q in norm.parameters() if q.grad is not None]
        if arm["clips"] == "torch":
            total = clip_grad_norm_([into, out, *norm.parameters()], bound)
        else:
            counted = shares if rank.rank else [*shares, *replicas]
            total = split.square(counted)
            dist.all_reduce(total)
            total = total.sqrt()
            for gradient in counted if arm["clips"] == "counted" else [*shares, *replicas]:
                gradient *= (bound / (total + 1e-6)).clamp(max=1.0)
        optimizer.step()
        rank.snapshot(step=step, total=total[None], norm=weights(norm))


@symptom(HOLDS, source="deepspeedai/DeepSpeed#1801")
def replicas_part(t: Tables) -> Finding:
    """Counted on rank 0 only, and scaled where counted, the replicas part."""
    return negated(ranks_agree(t, "counted", "norm"))


@symptom(REFUTED)
def norm_shows_it(t: Tables) -> Finding:
    """The norm that is reported then is off."""
    return negated(matches(t, "counted", "one_process", "total", step=0))


@symptom(HOLDS)
def only_if_it_acts(t: Tables) -> Finding:
    """As long as no norm exceeds the bound all of it is one process."""
    return all_of(ranks_agree(t, "slack", "norm"), matches(t, "slack", "slack_alone", "norm"))


@remedy(REFUTED)
def torch_knows(t: Tables) -> Finding:
    """Torch's clip_grad_norm_, called on all ranks, does for tensor-parallel layers."""
    return like_one_process(t, "torch", "norm")


@remedy(HOLDS)
def scale_all(t: Tables) -> Finding:
    """Count replicas once and scale everything: norm and weights are those of one process."""
    return all_of(*(like_one_process(t, "all", name) for name in ("total", "norm")))


SCENARIO = Scenario(
    title="A clip that scales what it counted: replicas part on all ranks but the first",
    family="clipping",
    cause="gradient_changed_on_one_rank",
    params=Params,
    run=run,
    check=split_equally("hidden"),
    headline=says(
        replicas_part=("scaled where counted, replicas part", "scaled where counted, they agree"),
        norm_shows_it=("with a wrong norm", "with the right norm"),
        only_if_it_acts=("only when the clip acts", "even without a clip"),
        torch_knows=("torch's own clip is right", "torch's own clip is no better"),
    ),
    arms=(
        one_process("one process", clips="torch"),
        one_process("one process, no clip", name="slack_alone", clips="torch", acts=False),
        faulty("counted", "what was counted is scaled", clips="counted"),
        faulty("torch", "clip_grad_norm_ on each rank", clips="torch"),
        control("slack", "the same below the bound", clips="counted", acts=False),
        fixed("all", "everything is scaled", clips="all"),
    ),
    claims=(replicas_part, norm_shows_it, only_if_it_acts, torch_knows, scale_all),
)
