"""Tensor parallelism by torch: one batch for all ranks of the mesh."""

from __future__ import annotations

from harness.causes.across import same, side_by_side
from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.causes.unequal import unequal_gradients
from harness.watch.evidence import Evidence


@cause(
    family="parallel layouts",
    sees="Replicated layers of a tensor-parallel model drift apart; the loss is another one on "
    "every rank.",
    why="The ranks of a tensor-parallel mesh compute one forward pass together, so they need the "
    "same batch, in the same order. A sampler or a seed that knows the rank gives each its own.",
    confirm="Print a checksum of the batch on every rank: it must be the same within the mesh.",
    change="give all ranks of the tensor-parallel mesh the same batch",
    fix="""
replicas = mesh["dp"]                          # shards of the data: not over "tp"
sampler = DistributedSampler(data, replicas.size(), replicas.get_local_rank())
# with tensor parallelism alone there is one batch for all ranks
""",
)
def tensor_parallel_inputs_differ(evidence: Evidence) -> Diagnosis | None:
    """Recognise unequal gradients of replicas beside shards, and other rows on every rank."""
    unequal = unequal_gradients(evidence)
    if unequal is None or unequal.owned or not unequal.parts:
        return None
    looks = [
        side
        for side in side_by_side(evidence, "inputs", "module", "update")
        if all(event.get("rows") and not event.get("averages") for event in side.values())
    ]
    apart = [side for side in looks if not same(event["rows"] for event in side.values())]
    if not apart or len(apart) < len(looks):
        return None
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            f"{listed(unequal.names)} is replicated beside {unequal.parts} parameters in parts, "
            f"and ranks had other rows at each of the {len(looks)} updates that were looked at",
        ),
        tensor=unequal.names[0],
    )
