"""Layers split over ranks that compute something else: nothing inside such a run can tell.

Each rank holds other parameters, which one process cannot replay, and what all ranks compute alike
is alike wrong. The texts are here for those who look the fault up; the rules say nothing.
"""

from __future__ import annotations

from harness.causes.cause import Diagnosis, cause
from harness.watch.evidence import Evidence

_FAMILY = "parallel layouts"


@cause(
    family=_FAMILY,
    sees="The loss starts log(N) higher on N tensor-parallel ranks, and all ranks agree on it.",
    why="A sharded cross-entropy adds up the exponentials of all ranks. Given logits that were "
    "gathered before, it adds all classes N times, and all ranks but the first look for targets "
    "behind the last class.",
    confirm="Compare the first loss with that of one process: the difference is log(N).",
    change="give the sharded loss the rank's own logits, or gathered ones to torch's loss",
    fix="""
loss = vocab_parallel_cross_entropy(own_logits, targets)     # not gather(own_logits)
""",
    reported=("NVIDIA/Megatron-LM#7452",),
)
def vocab_parallel_loss(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: the split layer cannot be replayed in one process."""
    return None


@cause(
    family=_FAMILY,
    sees="Tensor-parallel ranks report different losses with label smoothing, and equal ones "
    "without.",
    why="Smoothing needs the mean logit of all classes; the mean of a rank's own is another one on "
    "each rank, and its gradient N times as strong.",
    confirm="Set the smoothing to 0: the losses are equal.",
    change="sum the logits over the group and divide by the whole vocabulary",
    fix="""
mean = all_reduce(logits.sum(-1), group=tensor_parallel) / vocabulary
""",
    reported=("NVIDIA/Megatron-LM#7452",),
)
def label_smoothing_local(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: a loss of a part of the classes may be meant."""
    return None
