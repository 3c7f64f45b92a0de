"""Replicas among parts: tensor, sequence and data parallelism made by hand, or over groups."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.causes.unequal import Unequal, unequal_gradients
from harness.watch.evidence import Evidence


def bare_gradients(evidence: Evidence) -> tuple[Unequal, list[str], list[str]] | None:
    """Return unequal gradients that no wrapper is to reduce: the replicas, and the parts."""
    unequal = unequal_gradients(evidence)
    if unequal is None or unequal.owned:
        return None
    parts = set(evidence.parts.get(unequal.optimizer, ()))
    return unequal, [name for name in unequal.names if name not in parts], sorted(parts)


@cause(
    family="parallel layouts",
    sees="A layer norm, router or bias differs between tensor-parallel ranks after one update; the "
    "loss looks right.",
    why="Each rank of the group sees a part of the sequence or of the columns, so the gradient of "
    "a parameter that all of them hold is a part as well, and has to be summed over the group.",
    confirm="All-reduce the gradient of that parameter over the group before the update.",
    change="sum the gradient over the tensor-parallel group",
    fix="""
for parameter in norm.parameters():    # held by all ranks of the group
    dist.all_reduce(parameter.grad, group=tensor_parallel)   # the sum, not the mean
""",
    reported=(
        "NVIDIA/TransformerEngine#441",
        "NVIDIA/Megatron-LM#474",
        "NVIDIA/apex#1686",
        "EleutherAI/gpt-neox#1257",
    ),
)
def replicated_grad_not_reduced(evidence: Evidence) -> Diagnosis | None:
    """Recognise a replica with unequal gradients in an optimizer that holds parts as well."""
    bare = bare_gradients(evidence)
    if bare is None or not bare[1] or not bare[2]:
        return None
    unequal, replicas, parts = bare
    # Shares of a sum differ on all ranks; where most have the same bits somebody changed the rest.
    if has_odd_ranks(unequal):
        return None
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            f"{listed(replicas)} began equal on all ranks, {listed(parts)} of the same optimizer "
            "did not and are parts",
        ),
        tensor=replicas[0],
    )


def changed_among_parts(evidence: Evidence) -> Diagnosis | None:
    """Recognise replicas beside parts whose gradients have the same bits on most ranks."""
    bare = bare_gradients(evidence)
    if bare is None or not bare[1] or not bare[2] or not has_odd_ranks(bare[0]):
        return None
    unequal, replicas, parts = bare
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            f"{listed(replicas)} began equal on all ranks, and most ranks have the same gradient; "
            f"{listed(parts)} of the same optimizer are parts: a clip may have scaled these only",
        ),
        ranks=unequal.differences[0].odd,
        tensor=replicas[0],
    )


@cause(
    family="synchronisation",
    sees="Gradients or weights that are reduced in slices differ between ranks, without an error.",
    why="A slice of columns is a view with gaps. Gloo takes its memory for a dense tensor's: what "
    "is in the gaps is summed as well, and as many numbers at the end of the view are not.",
    confirm="Reduce a contiguous copy and compare.",
    change="reduce a contiguous copy, and copy it back",
    fix="""
dense = part.contiguous()
dist.all_reduce(dense)
part.copy_(dense)
""",
)
def strided_view_reduced(evidence: Evidence) -> Diagnosis | None:
    """Recognise a view with gaps in an all-reduce of tensors in main memory."""
    event = next(evidence.events("strided_reduction"), None)
    if event is None:
        return None
    parted = evidence.divergence is not None
    return Diagnosis(
        strength=Strength.PROVEN if parted else Strength.FACT,
        because=(
            f"all_reduce was given a view of shape {event['shape']} with strides "
            f"{event['stride']}: gloo sums memory without heeding them",
        ),
        where=event["at"],
        explains=parted,
    )


def has_odd_ranks(unequal: Unequal) -> bool:
    """Say whether most ranks agree: then something was averaged, and one rank did otherwise."""
    return bool(unequal.differences[0].odd)
