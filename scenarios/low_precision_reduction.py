"""Gradients reduced in bfloat16: a run other than one process's, on which all ranks agree.

A communication hook, or FSDP's reduce_dtype, casts each rank's gradient down, adds up, and casts
back. bfloat16 keeps 8 bits, so that each rounding takes up to 1/512, in a model that is float32
throughout. What is lost is the same on all ranks: their weights stay equal bit for bit. Adding up
in float32 what was sent in bfloat16 does not bring it back. Reported in pytorch/pytorch#106395
(stable on 96 GPUs, not on 384) and #190627, allenai/OLMo#280.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, like_one_process, matches, negated, ranks_agree, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/low_precision_reduction.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Fit a small net in float32; the dtype in which gradients are summed is all that differs."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import gradients, net, rows, weights

    # torch's own bf16_compress_hook wants a GPU.
    def bf16_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        mean = bucket.buffer().bfloat16() / rank.world_size
        if arm["adds_in"] == "float32":
            shares = [torch.empty_like(mean) for _ in range(rank.world_size)]
            dist.all_gather(shares, mean, group=group)
            mean = torch.stack(shares).float().sum(0)
        else:
            dist.all_reduce(mean, group=group)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().copy_(mean))
        return done

    model = DistributedDataParallel(net(rank).float())
    if arm["sends"] == "bfloat16":
        # DDP refuses annotations that are strings, as all of this file are.
        model.register_comm_hook(dist.group.WORLD, lambda group, bucket: bf16_hook(group, bucket))
    elif arm["sends"] == "float16":
        model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = (part.float() for part in rows(rank, p.batch))
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        rank.snapshot(step=step, gradients=gradients(model))
        optimizer.step()
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="pytorch/pytorch#106395")
def off_one_process(t: Tables) -> Finding:
    """With gradients reduced in bfloat16 the weights are not those of one process."""
    return negated(matches(t, "bfloat16", "one_process", "weights"))


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "bfloat16", "weights"))


@mechanism(HOLDS)
def is_the_dtype(t: Tables) -> Finding:
    """The first gradient is off by what bfloat16 rounds, and by nothing else."""
    t.require("bfloat16", "one_process")
    ranks = t.ranks("bfloat16")
    gap = max(t.distance("bfloat16", "one_process", "gradients", step=0, rank=r) for r in ranks)
    reason = f"the first gradient is {gap:.2g} from that of one process"
    return is_rounding(gap, dtype_floor(EPS["bfloat16"]), reason, "relative L2 distance")


@remedy(REFUTED)
def float16_is_enough(t: Tables) -> Finding:
    """float16, with three bits more, gives the gradient of one process."""
    return matches(t, "float16", "one_process", "gradients", step=0)


@remedy(REFUTED)
def adding_in_float32_is_enough(t: Tables) -> Finding:
    """So does adding up in float32 what was sent in bfloat16."""
    return matches(t, "sent_in_bfloat16", "one_process", "gradients", step=0)


@remedy(HOLDS, source="pytorch/pytorch#190627")
def reduce_in_float32(t: Tables) -> Finding:
    """Reduced in float32, the dtype of the model, N ranks train like one process."""
    return like_one_process(t, "float32")


SCENARIO = Scenario(
    title="Gradients reduced in bfloat16: ranks agree on weights that one process does not have",
    family="precision",
    cause="low_precision_reduction",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        off_one_process=("reduced in bfloat16 it is another run", "bfloat16 does no harm"),
        ranks_part=("the ranks part", "the ranks agree"),
        float16_is_enough=("float16 is enough", "float16 is off, too"),
        adding_in_float32_is_enough=("so is a sum in float32", "and so is a sum in float32"),
        reduce_in_float32=("float32 throughout is right", "float32 is no better"),
    ),
    arms=(
        one_process("one process", sends="float32", adds_in="float32"),
        faulty("bfloat16", "all-reduced in bfloat16", sends="bfloat16", adds_in="bfloat16"),
        faulty("float16", "fp16_compress_hook", sends="float16", adds_in="float16"),
        faulty("sent_in_bfloat16", "added in float32", sends="bfloat16", adds_in="float32"),
        fixed("float32", "as DDP does it", sends="float32", adds_in="float32"),
    ),
    claims=(
        off_one_process,
        ranks_part,
        is_the_dtype,
        float16_is_enough,
        adding_in_float32_is_enough,
        reduce_in_float32,
    ),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
