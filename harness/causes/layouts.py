"""Layers split over ranks, or recomputed, that are others: nothing inside such a run can tell.

One process cannot replay what each rank holds a part of, and what all ranks compute alike
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


@cause(
    family="clipping",
    sees="The gradient norm grows with the tensor-parallel size, or is too small; all ranks agree.",
    why="Of split layers each rank has a part of the gradient, and the squares of all ranks add "
    "up. Replicas are on every rank and count once; parts of one rank are not the whole.",
    confirm="Compare the first norm with that of one process.",
    change="sum the squares of parts over the group, and add those of replicas once",
    fix="""
squares = sum(g.square().sum() for g in parts)
dist.all_reduce(squares, group=tensor_parallel)
norm = (squares + sum(g.square().sum() for g in replicas)).sqrt()
""",
    reported=("NVIDIA/Megatron-LM#5916", "NVIDIA/Megatron-LM#7452"),
)
def clip_norm_counted_wrongly(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: all ranks scale alike, and which tensors are parts is known to the script."""
    return None


@cause(
    family=_FAMILY,
    sees="The loss starts right and trains worse than without context parallelism; ranks agree.",
    why="Backward of ring attention builds the probabilities of a chunk from its own log-sum-exp. "
    "In forward they were merged over all chunks; here they sum to 1 in each.",
    confirm="Compare gradients with one process: right above the last attention, off below.",
    change="save the merged log-sum-exp in forward, and use it in backward",
    fix="""
probability = (scores - merged_log_sum_exp).exp()        # not the chunk's own
""",
    reported=("NVIDIA/Megatron-LM#1464",),
)
def context_parallel_attention(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: a forward pass that sends is not replayed in one process."""
    return None


@cause(
    family="gradients",
    sees="Training is worse with activation recomputation; losses start right, and ranks agree.",
    why="A chunk of layers keeps its input and is run again in backward. If each layer is fed the "
    "chunk's input instead of the output of the one before, it gives the gradient of another net.",
    confirm="Recompute one layer at a time: the gradient changes.",
    change="feed each recomputed layer the output of the one before it",
    fix="""
for layer in chunk:
    inputs.append(x)
    x = layer(x)
""",
    reported=("NVIDIA/Megatron-LM#290",),
)
def recompute_wrong_input(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: a replay goes through the same backward pass."""
    return None


@cause(
    family="gradients",
    sees="Training is worse with activation recomputation and dropout, and right without dropout.",
    why="The second run of a segment draws other masks than the first: the gradient is that of "
    "another network than the loss.",
    confirm="Set the dropout to 0: recomputed and kept activations give the same gradients.",
    change="restore the random state for the second run",
    fix="""
checkpoint(segment, x, use_reentrant=False)      # preserve_rng_state=True is the default
""",
    reported=("NVIDIA/Megatron-LM#290",),
)
def recompute_random_state(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: a replay draws other masks as well."""
    return None


@cause(
    family="synchronisation",
    sees="Training is worse than in one process, and differently in every run; no error comes.",
    why="A collective with async_op=True returns at once. Until its handle was waited for the "
    "buffer holds what the rank put in, the result, or something between: who comes last decides.",
    confirm="Set async_op=False, or wait at once: runs are then the same, and one process's.",
    change="call work.wait() before the buffer is read or written",
    fix="""
work = dist.all_reduce(buffer, async_op=True)
...                                    # what needs the buffer in no way
work.wait()
buffer /= dist.get_world_size()
""",
    reported=("OpenNMT/OpenNMT-py#2295",),
)
def work_not_awaited(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: when a buffer is read is no event, and a device can be waited for otherwise."""
    return None


@cause(
    family=_FAMILY,
    sees="A pipeline with an odd number of layers trains a little worse; nothing else shows.",
    why="The layers are divided by a whole number, so that the remainder is on no stage, or sizes "
    "are rounded up and starting points down, so that a layer is on two.",
    confirm="Count the parameters of all stages and compare them with one process.",
    change="round both ends of a stage alike",
    fix="""
first, end = stage * layers // stages, (stage + 1) * layers // stages
""",
)
def pipeline_stage_division(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: stages hold different layers, and nobody says which are due."""
    return None


@cause(
    family=_FAMILY,
    sees="A loaded model starts off wrong with tensor parallelism, or learns its biases slowly.",
    why="A layer whose rows are split sums what the ranks return. A bias that every rank adds "
    "before the sum counts N times; 1/N of it counts once, and gets 1/N of its gradient.",
    confirm="Compare the first output with one process: they differ by N - 1 biases.",
    change="add the bias once, behind the all-reduce",
    fix="""
output = all_reduce(F.linear(x, weight), group=tensor_parallel) + bias
""",
)
def row_parallel_bias(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: all ranks agree, and the split layer cannot be replayed in one process."""
    return None


@cause(
    family=_FAMILY,
    sees="How evenly experts are used depends on the tensor-parallel size; losses look right.",
    why="The router's gradient from split experts is a share on each rank and is summed. A "
    "balancing loss that every rank computes from the same tokens is summed with it, N times.",
    confirm="Compare the router's first gradient with that of one process.",
    change="divide the balancing loss by the tensor-parallel size, or add it behind the sum",
    fix="""
(main + balance / tensor_parallel_size).backward()
""",
    reported=("NVIDIA/Megatron-LM#5047",),
)
def aux_loss_scale_tp(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: how strong a loss is meant to be is the script's."""
    return None


@cause(
    family=_FAMILY,
    sees="Results with quantised weights depend on the tensor-parallel size; ranks agree.",
    why="The scale of a quantised tensor follows from its largest value. Of a weight that is split "
    "over ranks that is the largest on all of them; without a maximum over that group each shard "
    "has a scale of its own.",
    confirm="Print the scale of one layer on every rank: it must be the same.",
    change="take the maximum over the tensor-parallel group",
    fix="""
dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=tensor_parallel)
""",
    reported=("NVIDIA/Megatron-LM#442",),
)
def amax_over_wrong_group(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: scales are the script's own, and may be meant for each shard."""
    return None


@cause(
    family=_FAMILY,
    sees="A tied embedding is another weight on the first pipeline stage than on the last.",
    why="Each of the two stages has a copy, and a part of the gradient. Without their sum in both "
    "copies, or with another optimizer for one of them, the copies part.",
    confirm="Compare a checksum of the embedding and of the output layer after an update.",
    change="sum both gradients over the two stages before the update",
    fix="""
if stage in (first, last):
    dist.all_reduce(embedding.weight.grad, group=first_and_last)      # the sum, not the mean
""",
    reported=(
        "NVIDIA/Megatron-LM#656",
        "NVIDIA/Megatron-LM#844",
        "NVIDIA/Megatron-LM#4641",
    ),
)
def untied_embedding_pipeline(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: stages hold different weights, and which are one is the script's."""
    return None
