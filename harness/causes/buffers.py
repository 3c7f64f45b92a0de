"""Buffers, such as running statistics, which nobody reduces."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.watch.divergence import Divergence
from harness.watch.evidence import Evidence
from harness.watch.journal import Event
from harness.watch.layout import EVALUATION


def _unequal(evidence: Evidence) -> tuple[Divergence, Event | None] | None:
    """Return an evaluation whose buffers differ, and what was evaluated."""
    found = evidence.divergence
    if found is None or found.phase != EVALUATION or found.differences[0].kind != "buffer":
        return None
    for event in evidence.events("evaluation"):
        if event["source"] == evidence.source:
            return found, event
    return found, None


@cause(
    family="buffers",
    sees="One model, another validation score on every rank; all weights are equal.",
    why="Running statistics, and ranges of quantisation observers, follow each rank's own batches. "
    "DDP sends rank 0's around when its forward begins, and not at all with "
    "broadcast_buffers=False; the batch after that moves them apart again.",
    confirm="Print a running_mean on every rank right before the evaluation.",
    change="average or send the buffers around before evaluating, or use a synchronised norm",
    fix="""
for buffer in model.buffers():         # before every evaluation and every checkpoint
    if buffer.is_floating_point():
        dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
# Of an observer's min_val and max_val take MIN and MAX, and compute scale anew from them.
""",
    reported=(
        "pytorch/pytorch#13711",
        "huggingface/pytorch-image-models#110",
        "open-mmlab/mmdetection#4582",
    ),
)
def bn_stats_local(evidence: Evidence) -> Diagnosis | None:
    """Recognise an evaluation of the model that is trained with buffers of each rank's own."""
    unequal = _unequal(evidence)
    found, event = unequal if unequal is not None else (None, None)
    if found is None or event is None or event["what"] not in ("wrapper", "inner"):
        return None
    if _variances_alone(found):
        return None
    told = next(
        (one for one in evidence.events("wrapper") if one["module"] == event["module"]), None
    )
    if told is None:
        return None
    if not told["sync_buffers"]:
        because = "the wrapper was told not to send buffers around"
    elif event["what"] == "inner":
        because = "the module inside the wrapper was evaluated, which sends no buffers around"
    else:
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(because, f"unequal: {listed([one.name for one in found.differences])}"),
        where=event["at"],
    )


def _variances_alone(found: Divergence) -> bool:
    """Say whether running variances differ, and no running mean does."""
    return all(one.name.rpartition(".")[2] == "running_var" for one in found.differences)


@cause(
    family="buffers",
    sees="With batches of unequal size running_var differs between ranks and running_mean does "
    "not; N ranks do not train like one process.",
    why="A synchronised norm combines the moments of all ranks as if each had as many values as "
    "it has itself. Their weights are then wrong, and so is the factor n / (n - 1), which is each "
    "rank's own.",
    confirm="Train with batches of one size on all ranks: the running variances agree.",
    change="gather the counts along with the moments, and weight by them",
    fix="""
count = torch.tensor(float(len(x)))
dist.all_reduce(count)                 # not len(x) * world_size
mean = all_reduce(x.mean(0) * len(x) / count)
""",
    reported=("pytorch/pytorch#22192",),
)
def sync_norm_local_count(evidence: Evidence) -> Diagnosis | None:
    """Recognise unequal running variances beside running means that are synchronised."""
    unequal = _unequal(evidence)
    found, event = unequal if unequal is not None else (None, None)
    if found is None or event is None or not _variances_alone(found):
        return None
    return Diagnosis(
        # Somebody may have written into them, such as a clip on one rank.
        strength=Strength.LIKELY,
        because=(
            f"running variances differ and running means do not: "
            f"{listed([one.name for one in found.differences])}",
        ),
        where=event["at"],
        tensor=found.differences[0].name,
    )


@cause(
    family="buffers",
    sees="The score of the averaged model depends on the rank; the model it follows is right.",
    why="An average of the weights takes the buffers of its own rank, running statistics among "
    "them. What is sent around later, in the model that is trained, does not reach the average.",
    confirm="Print a running_mean of the averaged model on every rank.",
    change="send the averaged model's buffers around before evaluating it",
    fix="""
for buffer in ema.buffers():           # or update batch norm's statistics on all ranks alike
    dist.broadcast(buffer, src=0)
""",
    reported=("Megvii-BaseDetection/YOLOX#1176",),
)
def ema_buffers_local(evidence: Evidence) -> Diagnosis | None:
    """Recognise an evaluation of a module that nobody wraps, with equal weights."""
    unequal = _unequal(evidence)
    found, event = unequal if unequal is not None else (None, None)
    if found is None or event is None or event["what"] != "other":
        return None
    return Diagnosis(
        # A teacher, or a model that is trained without a wrapper, is another matter.
        strength=Strength.PROVEN if event["average"] else Strength.LIKELY,
        because=(
            f"{event['class']}, which no wrapper holds, was evaluated with equal weights and "
            f"unequal {listed([one.name for one in found.differences])}",
        ),
        where=event["at"],
    )


@cause(
    family="buffers",
    sees="A value written into a buffer, such as a clipped running_var, is gone after the next "
    "forward pass, on some ranks.",
    why="DDP sends rank 0's buffers to all others when its forward begins. What another rank has "
    "written into its own is overwritten.",
    confirm="Print the buffer on every rank before and after model(x).",
    change="write to buffers on rank 0, or on every rank alike",
    fix="""
norm.running_var.clamp_(min=1e-2)      # on all ranks, not behind `if rank == 1`
""",
)
def buffer_broadcast(evidence: Evidence) -> Diagnosis | None:
    """Recognise buffers that ranks other than 0 alone have written between two forward passes."""
    written: dict[tuple[int, int], dict[int, Event]] = {}
    for event in evidence.events("buffers_written"):
        written.setdefault((event["module"], event["update"]), {})[event["rank"]] = event
    for (module, update), by_rank in sorted(written.items()):
        told = next((e for e in evidence.events("wrapper") if e["module"] == module), None)
        group = next((e for e in evidence.events("wrap") if e["module"] == module), None)
        if told is None or group is None or not told["sync_buffers"]:
            continue
        source = group.get("ranks", evidence.ranks)[0]
        if source in by_rank or source not in evidence.ranks:
            continue
        # Whoever sends values around by hand may write what rank 0 has already.
        lost = {r: names for r, e in by_rank.items() if (names := e["overwritten"])}
        if not lost:
            continue
        names = next(iter(lost.values()))
        return Diagnosis(
            strength=Strength.PROVEN,
            because=(
                f"{listed(names)} was written between two forward passes, not on rank "
                f"{source}, whose buffers the next one sends to all",
            ),
            step=update,
            ranks=tuple(lost),
            tensor=names[0],
            explains=False,
        )
    return None
