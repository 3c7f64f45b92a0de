"""Numbers in the log that are not what they are taken for."""

from __future__ import annotations

from harness.causes.across import each_rank, same
from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence
from harness.watch.journal import Event


@cause(
    family="metrics",
    sees="The score depends on the number of GPUs and on the batch size.",
    why="Each rank, or each batch, is averaged first, and the averages are averaged again: those "
    "over fewer samples weigh as much as the others.",
    confirm="Add up numerator and denominator over all ranks, and divide once.",
    change="all-reduce numerator and denominator, then divide",
    fix="""
both = torch.stack([correct.sum().double(), torch.tensor(float(count))])
dist.all_reduce(both)
accuracy = both[0] / both[1]
""",
    reported=("Lightning-AI/pytorch-lightning#4493", "PrimeIntellect-ai/prime-rl#1850"),
)
def mean_of_means(evidence: Evidence) -> Diagnosis | None:
    """Note single numbers that are added up after an evaluation with unequal counts."""
    for first in _evaluations(evidence, evidence.ranks[0]) if evidence.ranks else ():
        counts = {
            rank: event["count"]
            for rank in evidence.ranks
            for event in _evaluations(evidence, rank)
            if (event["step"], event["loader"]) == (first["step"], first["loader"])
        }
        reduced = [
            e for e in evidence.events("reduced", first["rank"]) if e["step"] == first["step"]
        ]
        single = [e for e in reduced if len(e["mine"]) == 1 and not e["mine"][0].is_integer()]
        if len(counts) == len(evidence.ranks) and not same(counts.values()) and single:
            return Diagnosis(
                # It may be a sum, and the count may take another way.
                strength=Strength.FACT,
                because=(
                    f"a single number was added up over ranks after an evaluation of "
                    f"{each_rank(counts)} samples: if it is a mean, all ranks weigh the same",
                ),
                where=single[0]["at"],
                step=first["step"],
                explains=False,
            )
    return None


@cause(
    family="metrics",
    sees="The training curve depends on the number of GPUs, and is noisier with more of them.",
    why="Rank 0 logs the loss of its own rows, which is not that of the batch; DDP averages "
    "gradients, and no loss. dist.reduce gives the sum to one rank and leaves the others theirs.",
    confirm="Print the loss on every rank: each has another.",
    change="all-reduce a detached copy of the loss before it is logged or decided by",
    fix="""
logged = loss.detach().clone()         # not the loss itself: backward needs it as it is
dist.all_reduce(logged)
logged /= dist.get_world_size()
""",
    reported=("Lightning-AI/pytorch-lightning#12407", "KellerJordan/modded-nanogpt#2"),
)
def log_is_rank0_only(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: ranks have losses of their own as a rule, and what is logged is not known."""
    return None


@cause(
    family="metrics",
    sees="The gradient norm in the log differs between ranks under fully_shard; training is right.",
    why="The norm of a sharded gradient is a DTensor that has still to be added up over the ranks. "
    ".item() and to_local() give what this rank has.",
    confirm="Print norm.placements: _NormPartial has not been added up, Replicate has.",
    change="read it with full_tensor() on all ranks, or log what clip_grad_norm_ returns",
    fix="""
norm = parameter.grad.norm().full_tensor().item()      # on every rank: it is a collective
""",
    reported=("pytorch/torchtitan#766", "pytorch/torchtitan#19"),
)
def grad_norm_reported_local(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: what is read of a tensor, and what it is called, is not known."""
    return None


def _evaluations(evidence: Evidence, rank: int) -> list[Event]:
    return [e for e in evidence.events("pass", rank) if "count" in e and not e["updates"]]
