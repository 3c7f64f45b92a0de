"""Reductions over a group of ranks that is not the one meant."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.causes.unequal import unequal_gradients
from harness.watch.evidence import Evidence
from harness.watch.layout import START


@cause(
    family="parallel layouts",
    sees="Ranks agree within groups and differ between them.",
    why="A reduction over a group makes equal what its members hold, and nobody else. Replicas "
    "that are spread over several groups need a reduction over all of them as well.",
    confirm="Print dist.get_process_group_ranks(model.process_group) on every rank.",
    change="reduce over the group of all ranks that hold the replica",
    fix="""
model = DistributedDataParallel(net, process_group=replicas)   # every rank with the same weights
""",
    reported=("NVIDIA/Megatron-LM#1628",),
)
def wrong_group(evidence: Evidence) -> Diagnosis | None:
    """Recognise replicas that agree exactly within the groups that wrappers reduce over."""
    unequal = unequal_gradients(evidence)
    if unequal is None or not unequal.modules:
        return None
    module = unequal.modules[0]
    groups = {
        tuple(event["ranks"])
        for event in evidence.events("wrap")
        if event["module"] == module and "ranks" in event
    }
    agree = {tuple(sorted(group)) for group in unequal.differences[0].groups}
    if len(groups) < 2 or agree != groups:
        return None
    said = " and ".join(str(list(group)) for group in sorted(groups))
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(f"the wrapper reduces over the ranks {said}, which agree among themselves",),
    )


@cause(
    family="parallel layouts",
    sees="Experts learn less than they should; all ranks have the same gradient of their expert.",
    why="Dense layers are replicated on all ranks, an expert on some. Reduced over the dense "
    "layers' group, the gradients of unlike experts are added up.",
    confirm="Compare an expert's gradient between ranks that hold unlike ones: it is the same.",
    change="reduce experts over the ranks that hold the same one",
    fix="""
dist.all_reduce(expert.grad, group=expert_data_parallel)      # not the dense layers' group
""",
    reported=("NVIDIA/Megatron-LM#1628",),
)
def wrong_group_after_remesh(evidence: Evidence) -> Diagnosis | None:
    """Recognise unlike parts with one gradient, that agree exactly within groups of the script."""
    found = evidence.divergence
    if found is None or found.phase != START or found.differences[0].kind != "parameter":
        return None
    made = {tuple(event["ranks"]) for event in evidence.events("new_group")}
    agree = {tuple(sorted(group)) for group in found.differences[0].groups}
    if any(evidence.events("wrap")) or not agree <= made:
        return None
    names = [one.name for one in found.differences if one.kind == "parameter"]
    said = " and ".join(str(list(group)) for group in sorted(agree))
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            f"{listed(names)} begin equal within the groups {said}, which the script has made, and "
            "not between them; their first gradients are equal on all ranks",
        ),
        tensor=names[0],
    )
