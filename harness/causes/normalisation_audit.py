"""What only the replay of an update shows: the gradient is not the one that is due."""

from __future__ import annotations

from harness.causes.audited import (
    Audited,
    accumulated,
    agreeing,
    complete,
    is_averaged,
    near,
    times,
)
from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.watch.evidence import Evidence
from harness.watch.journal import Event


def _proven(found: Audited, sentence: str, strength: Strength = Strength.PROVEN) -> Diagnosis:
    return Diagnosis(
        strength=strength,
        because=(f"{sentence} ({found.how_often})",),
        where=found.where,
        step=found.step,
        explains=False,
    )


@cause(
    family="normalisation",
    sees="N GPUs train as with N times the learning rate; replicas are equal.",
    why="Gradients are added up over the ranks, and not divided by their number. That is right for "
    "a loss which is already divided by the samples of all ranks, and for no other.",
    confirm="Compare the norm of the gradient with that of one process on the whole batch.",
    change="divide the summed gradients by world_size",
    fix="""
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()
""",
)
def gradients_summed(evidence: Evidence) -> Diagnosis | None:
    """Recognise the gradients of local means, added up."""
    world = evidence.world_size
    found = times(evidence, float(world)) if world > 1 else None
    if found is None or not all(near(e["synchronised"]["factor"], world) for e in found.events):
        return None
    return _proven(
        found,
        f"each rank's loss is its own mean, and the gradient is the sum over {world} ranks: "
        f"exactly {world} times that of one process",
    )


@cause(
    family="normalisation",
    sees="N GPUs train as with the learning rate over N; replicas are equal.",
    why="DDP has averaged the gradients by the end of backward; they are divided once more.",
    confirm="Print the norm of the gradient right after backward, and before optimizer.step().",
    change="leave the averaging to DDP",
    fix="""
loss.backward()            # averages over ranks
optimizer.step()           # no all_reduce and no division in between
""",
)
def averaged_twice(evidence: Evidence) -> Diagnosis | None:
    """Recognise gradients that were divided by the number of ranks after backward."""
    world = evidence.world_size
    found = times(evidence, 1 / world) if world > 1 else None
    if found is None or not all(
        near(e["later"]["factor"], 1 / world) and e["later"]["clean"] for e in found.events
    ):
        return None
    return _proven(
        found,
        f"after backward the gradient is that of one process, and the optimizer is given exactly "
        f"1/{world} of it",
        Strength.LIKELY,
    )


@cause(
    family="normalisation",
    sees="Accumulating over M micro-batches trains as with M times the learning rate, or 1/M.",
    why="The losses of the micro-batches are added up without being divided by their number, or "
    "are divided twice: by the script and by the library that runs it.",
    confirm="Compare the norm of the gradient with that of the window as one batch.",
    change="divide each loss by the number of micro-batches, once",
    fix="""
(loss / accumulation).backward()      # not if accelerator.backward divides already
""",
)
def accumulation_factor(evidence: Evidence) -> Diagnosis | None:
    """Recognise a gradient that is exactly M times, or 1/M of, that of the window as one batch."""
    length = accumulated(evidence)
    # A factor that is the number of ranks as well says nothing about either.
    if length < 2 or length == evidence.world_size:
        return None
    due = [(float(length), f"{length} times")]
    # Half a squared error is an ordinary loss.
    due += [(1 / length, f"1/{length} of")] if length > 2 else []
    for factor, said in due:
        found = times(evidence, factor)
        if found is not None and all(
            near(e["synchronised"]["factor"] * e["later"]["factor"], 1.0) for e in found.events
        ):
            return _proven(
                found,
                f"an update is made of {length} micro-batches, and its gradient is exactly {said} "
                "that of all of them as one batch",
                Strength.LIKELY,
            )
    return None


def _odd_tensors(event: Event, world: int) -> dict[str, float]:
    """Return the tensors that have a factor of their own, if all of them have the same one."""
    seen = event["synchronised"] if not is_averaged(event) else event["later"]
    common = seen["factor"] / (world if seen is event["synchronised"] else 1)
    if seen["residual"] > 4.0 or not seen["fault"]:
        return {}
    ratios = {name: factor / common for name, factor, _, _ in seen["tensors"]}
    odd = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > 1e-3}
    same = odd and max(odd.values()) - min(odd.values()) < 1e-3 * max(map(abs, odd.values()))
    return odd if same and len(odd) < seen["compared"] else {}


def _is_expert(name: str) -> bool:
    return any(word in name.lower() for word in ("expert", "moe"))


@cause(
    family="normalisation",
    sees="Experts of a mixture learn with another rate than the rest; replicas are equal.",
    why="An expert already sums up what the tokens of all ranks of its group give it, and is then "
    "averaged over a smaller group than the dense layers are.",
    confirm="Compare an expert's gradient with that of one process that has all experts.",
    change="divide expert gradients by the size of the whole data-parallel group",
    fix="""
for p in expert_parameters:
    p.grad /= data_parallel_size      # not the size of the group of this expert's replicas
""",
    reported=(
        "pytorch/pytorch#160285",
        "microsoft/DeepSpeed#5259",
        "facebookresearch/fairseq#4220",
    ),
)
def expert_grad_scale(evidence: Evidence) -> Diagnosis | None:
    """Recognise experts whose gradients, and no others, are some number of times what is due."""
    world = evidence.world_size

    def experts(event: Event) -> bool:
        odd = _odd_tensors(event, world)
        return bool(odd) and all(map(_is_expert, odd))

    found = agreeing(complete(evidence), experts, share=0.5)
    if found is None:
        return None
    odd = _odd_tensors(found.first, world)
    return _proven(
        found,
        f"{listed(list(odd))} have {next(iter(odd.values())):.4g} times the gradient of one "
        "process, all other tensors once",
    )


@cause(
    family="normalisation",
    sees="Replicas are equal and learn something else than one process would.",
    why="What the ranks hold after synchronisation is not the mean of what their own losses ask "
    "for. Which part of the program does that is not known.",
    confirm="Run with --audit every=1; the first audited update with a distance is where to look.",
    change="look at the tensors named, from backward to the end of the synchronisation",
    fix="""
torchrun --nproc-per-node=N -m harness.watch --audit every=1 train.py
""",
)
def gradient_not_of_one_process(evidence: Evidence) -> Diagnosis | None:
    """Recognise a synchronised gradient that no factor turns into the replayed one."""
    if evidence.divergence is not None:
        return None

    def differs(event: Event) -> bool:
        return bool(event["synchronised"]["fault"])

    found = agreeing(complete(evidence), differs, share=0.0)
    if found is None or expert_grad_scale(evidence) is not None:
        return None
    name, factor, residual, floor = found.first["synchronised"]["tensors"][0]
    common = found.first["synchronised"]["factor"] / evidence.world_size
    apart = max(residual, abs(factor / common - 1))
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            f"the gradient of {name} is {apart:.2g} of its norm from the mean of what the ranks' "
            f"own losses ask for, {apart / floor:.2g} rounding floors ({found.how_often})",
        ),
        where=found.where,
        step=found.step,
        tensor=name,
        explains=False,
    )
