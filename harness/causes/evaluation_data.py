"""Samples of an evaluation: counted twice, left out, or trained on as well."""

from __future__ import annotations

from harness.causes.across import passes
from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence
from harness.watch.journal import Event


@cause(
    family="data",
    sees="The score depends on the number of GPUs.",
    why="DistributedSampler makes shares equal: it repeats samples, or with drop_last leaves some "
    "out. Whoever adds up over ranks counts them twice, or not at all.",
    confirm="Add up the number of evaluated samples over all ranks, and compare with the data set.",
    change="evaluate range(rank, n, world_size), or cut the padding after a gather",
    fix="""
mine = Subset(dataset, range(rank, len(dataset), world_size))     # no padding
loader = DataLoader(mine, batch_size)
""",
    reported=("pytorch/pytorch#25162", "pytorch/vision#4559", "roboflow/rf-detr#1507"),
)
def eval_padding(evidence: Evidence) -> Diagnosis | None:
    """Recognise an evaluation whose counts hold the padding of the sampler."""
    trains = any(passes(evidence, r, trained=True) for r in evidence.ranks) or any(
        evidence.events("update")
    )
    for rank in evidence.ranks:
        for event in passes(evidence, rank, trained=False):
            length, total = event.get("samplers_length"), event.get("total_size")
            if not trains or not length or not total or total == length:
                continue
            if event["count"] < total // event["num_replicas"]:
                continue
            found = _counted(evidence, rank, event, length, total)
            if found is not None:
                return found
    return None


def _counted(
    evidence: Evidence, rank: int, event: Event, length: int, total: int
) -> Diagnosis | None:
    step = event["step"]
    off = f"{total - length} of them twice" if total > length else f"{length - total} left out"
    because = [
        f"DistributedSampler hands out {total} samples for the evaluation of {length}, {off}"
    ]
    reduced = [
        e
        for e in evidence.events("reduced", rank)
        if e["step"] == step and any([*e["mine"], *(e["all"] or ())])
    ]
    if any(length in (e["all"] or ()) for e in reduced):
        # What was repeated has been left out, or what is missing was added.
        return None
    gathered = any(e["step"] == step for e in evidence.events("gathered", rank))
    counted = next((e for e in reduced if total in (e["all"] or ())), None)
    strength = Strength.FACT
    if counted is not None and counted["mine"] != counted["all"]:
        because.append(f"the count that all ranks added up at {counted['at']} is {total}")
        strength = Strength.PROVEN
    elif reduced and not gathered:
        because.append(f"what was added up at {reduced[0]['at']} was not cut before")
        strength = Strength.LIKELY
    return Diagnosis(
        strength=strength,
        because=tuple(because),
        where=event["at"],
        step=step,
        explains=False,
    )


@cause(
    family="data",
    sees="Validation is better than it should be.",
    why="The two parts of a random split overlap, because they come from splits with other seeds: "
    "a split per process, or one anew after a resume.",
    confirm="Intersect the indices of both parts, over all ranks.",
    change="split with one fixed seed on all ranks",
    fix="""
generator = torch.Generator().manual_seed(0)       # on all ranks, and after a resume
train, valid = random_split(dataset, lengths, generator=generator)
""",
)
def train_validation_overlap(evidence: Evidence) -> Diagnosis | None:
    """Recognise parts of one data set that have samples in common."""
    for rank in evidence.ranks:
        for valid in _parts(evidence, rank, trained=False):
            if set(valid["within"]) <= _trained_on(evidence, rank, valid):
                # Evaluating what one trains on is another thing, and wanted.
                continue
            for other in evidence.ranks:
                for train in _parts(evidence, other, trained=True):
                    found = _overlap(train, valid, rank, other)
                    if found is not None and _same_era(evidence, train, valid):
                        return found
    return None


def _parts(evidence: Evidence, rank: int, *, trained: bool) -> list[Event]:
    return [e for e in passes(evidence, rank, trained=trained) if e.get("within")]


def _trained_on(evidence: Evidence, rank: int, valid: Event) -> set[int]:
    """Return the samples that all ranks together have trained this model on before."""
    return {
        index
        for other in evidence.ranks
        for train in _parts(evidence, other, trained=True)
        if _comparable(train, valid, rank, other) and _same_era(evidence, train, valid)
        for index in train["within"]
    }


def _same_era(evidence: Evidence, train: Event, valid: Event) -> bool:
    """Say whether the model that was evaluated is the one that was trained: no other optimizer.

    Folds of a cross-validation overlap, each with a model of its own.
    """
    own = set(train["updates"])
    between = range(min(train["began"], valid["began"]), max(train["step"], valid["step"]) + 1)
    others = (u for u in evidence.updates(train["rank"]) if u["step"] in between)
    return all(str(u["optimizer"]) in own for u in others)


def _comparable(train: Event, valid: Event, rank: int, other: int) -> bool:
    if train["part_of"] != valid["part_of"] or train["whole_length"] != valid["whole_length"]:
        return False
    # What is trained on later only, such as what was chosen by its score, is not known yet.
    if train["began"] >= valid["began"]:
        return False
    # Without a sampler that shares positions out, each rank may have a data set of its own.
    return rank == other or bool(train.get("num_replicas"))


def _overlap(train: Event, valid: Event, rank: int, other: int) -> Diagnosis | None:
    if not _comparable(train, valid, rank, other):
        return None
    both = set(train["within"]) & set(valid["within"])
    if not both:
        return None
    where = "" if rank == other else f" (trained on rank {other}, evaluated on rank {rank})"
    return Diagnosis(
        strength=Strength.PROVEN if rank == other else Strength.LIKELY,
        because=(
            f"{len(both)} of the {len(valid['within'])} samples of an evaluation are trained on "
            f"as well{where}",
        ),
        where=valid["at"],
        explains=False,
    )
