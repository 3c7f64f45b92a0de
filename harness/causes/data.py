"""Samples that are not shared out as the user believes."""

from __future__ import annotations

from collections import defaultdict

from harness.causes.across import averages, each_rank, passes, same, side_by_side
from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence
from harness.watch.journal import Event


@cause(
    family="data",
    sees="Every epoch has the same order; nothing fails, generalisation suffers.",
    why="DistributedSampler shuffles with seed + epoch, and only set_epoch changes the epoch.",
    confirm="Print the first indices of two epochs: they are the same.",
    change="call sampler.set_epoch(epoch) at the start of each epoch",
    fix="""
for epoch in range(epochs):
    sampler.set_epoch(epoch)           # before the loader is iterated
    for batch in loader: ...
""",
    reported=("pytorch/pytorch#31771", "NVIDIA/tacotron2#241", "Spijkervet/SimCLR#26"),
)
def set_epoch_missing(evidence: Evidence) -> Diagnosis | None:
    """Recognise two epochs of an optimizer with the same order, and the same epoch number."""
    for rank in evidence.ranks:
        shuffled = [e for e in passes(evidence, rank, trained=True) if e.get("shuffle")]
        # One that ever had another epoch is told of it; what repeats then is wanted.
        told = {e["loader"] for e in shuffled if e["epoch"] != shuffled[0]["epoch"]}
        before: dict[tuple[object, ...], Event] = {}
        for event in shuffled:
            if event["loader"] in told or event["count"] <= 8:
                continue
            # The same optimizer: a second training in the same process begins with epoch 0 again.
            key = (*sorted(event["updates"]), event["length"], event["epoch"], event["order"])
            first = before.setdefault(key, event)
            if first is not event:
                return Diagnosis(
                    strength=Strength.PROVEN,
                    because=(
                        f"passes {first['number']} and {event['number']} over the loader have the "
                        f"same {event['count']} samples in the same order; DistributedSampler "
                        f"shuffles, and is at epoch {event['epoch']} in both",
                    ),
                    where=event["at"],
                    step=event["began"],
                    explains=False,
                )
    return None


@cause(
    family="data",
    sees="N GPUs give the result of one, in the time of one.",
    why="All ranks read the same samples, so that all have the same gradient, and the average of "
    "N equal gradients is that gradient.",
    confirm="Print a digest of the first batch on each rank: it must differ.",
    change="give each rank samples of its own, with DistributedSampler or by rank and worker",
    fix="""
sampler = DistributedSampler(dataset)                # and sampler.set_epoch(epoch)
loader = DataLoader(dataset, batch_size, sampler=sampler)
# in an IterableDataset: islice(stream, rank * workers + worker, None, world_size * workers)
""",
    reported=("Shark-NLP/DiffuSeq#37", "PatrickHua/SimSiam#16", "huggingface/datasets#5360"),
)
def data_not_sharded(evidence: Evidence) -> Diagnosis | None:
    """Recognise ranks that train on the same rows at every look."""
    looks = side_by_side(evidence, "inputs", "module", "update")
    looks = [side for side in looks if all(averages(e, evidence) for e in side.values())]
    looks = [side for side in looks if all(e.get("rows") for e in side.values())]
    if len(looks) < 2:
        return None
    rows = {tuple(e["rows"]) for side in looks for e in side.values()}
    if all(same(e["rows"] for e in side.values()) for side in looks) and len(rows) > 1:
        return _same_rows(evidence, len(looks), looks[0][evidence.ranks[0]])
    return _whole_on_each(evidence, looks[0][evidence.ranks[0]]["count"])


def _same_rows(evidence: Evidence, looks: int, first: Event) -> Diagnosis:
    loaders = {r: _training(evidence, r) for r in evidence.ranks}
    because = [
        f"all ranks trained on the same {first['count']} rows, at each of the {looks} updates that "
        "were looked at"
    ]
    one = next(iter(loaders.values()))
    if not all(loaders.values()) or one is None:
        # Nothing says that it is not wanted.
        return Diagnosis(strength=Strength.FACT, because=tuple(because), explains=False)
    if one["sampler"] == "DistributedSampler":
        told = {rank: e.get("rank") for rank, e in loaders.items() if e is not None}
        because.append(
            f"DistributedSampler has num_replicas={one['num_replicas']} and, as its rank, "
            + each_rank(told)
        )
    else:
        because.append(f"the loader of {one['class']} draws with {one['sampler']} on all ranks")
    return Diagnosis(
        strength=Strength.PROVEN, because=tuple(because), where=one["at"], explains=False
    )


def _whole_on_each(evidence: Evidence, rows: int) -> Diagnosis | None:
    """Recognise ranks each of which goes through the whole data set, in an order of its own."""
    loaders = {rank: _training(evidence, rank) for rank in evidence.ranks}
    first = loaders[evidence.ranks[0]]
    for event in loaders.values():
        if event is None or first is None or "count" not in event:
            return None
        whole = event["length"] and event["count"] >= 0.9 * event["length"]
        # A batch that is larger than what the model gets is shared out in the loop.
        if not whole or event["length"] != first["length"] or event["batch_sizes"][1] != rows:
            return None
    equal, unequal = _contents(evidence, {r: [e] for r, e in loaders.items() if e is not None})
    if equal < 4 or unequal or first is None:
        return None
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            f"in one pass each rank trains on all {first['length']} samples of {first['class']}, "
            f"drawn with {first['sampler']} and in an order of its own: an epoch is "
            f"{evidence.world_size} epochs",
        ),
        where=first["at"],
        explains=False,
    )


def _training(evidence: Evidence, rank: int) -> Event | None:
    return next((e for e in evidence.events("pass", rank) if e["updates"]), None)


@cause(
    family="data",
    sees="Nothing fails; a quarter of the samples or more is never seen in an epoch.",
    why="A distributed sampler cuts its shares out of positions, and trusts that a position is the "
    "same sample on all ranks and that all ranks shuffle alike.",
    confirm="Print the name of sample 0 on each rank, and the seed of the sampler.",
    change="sort the list of samples, and shuffle it with one seed on all ranks",
    fix="""
files = sorted(glob(pattern))                        # a directory has no order
random.Random(seed).shuffle(files)                   # the same seed on all ranks
sampler = DistributedSampler(dataset, seed=seed)     # not seed + rank
""",
    reported=("QwenLM/Qwen3-VL#1971", "ByteDance-Seed/VeOmni#330", "pytorch/vision#192"),
)
def order_differs_before_sampler(evidence: Evidence) -> Diagnosis | None:
    """Recognise samplers with seeds of their own, or other samples at the same position."""
    by_rank = {
        rank: [e for e in evidence.events("pass", rank) if e.get("num_replicas")]
        for rank in evidence.ranks
    }
    if len(by_rank) < 2 or not all(by_rank.values()):
        return None
    if any(e["num_replicas"] != evidence.world_size for es in by_rank.values() for e in es):
        return None
    firsts = {rank: events[0] for rank, events in by_rank.items()}
    seeds = {rank: event["seed"] for rank, event in firsts.items()}
    at = firsts[evidence.ranks[0]]["at"]
    if not same(seeds.values()) and all(e["shuffle"] for e in firsts.values()):
        return Diagnosis(
            strength=Strength.PROVEN,
            because=(f"DistributedSampler shuffles with seed {each_rank(seeds)}",),
            where=at,
            explains=False,
        )
    equal, unequal = _contents(evidence, by_rank)
    elsewhere, repeated = _elsewhere(by_rank)
    # Augmentation changes what is at an index, and then it is nowhere else either.
    if equal > unequal or elsewhere < 3 or elsewhere <= 3 * repeated:
        return None
    because = [
        f"{elsewhere} samples of {firsts[evidence.ranks[0]]['class']} were seen on rank "
        f"{evidence.ranks[0]} and, at other positions, on another rank, and {repeated} twice on one"
    ]
    if unequal:
        because.append(f"{unequal} of {equal + unequal} common positions hold different samples")
    return Diagnosis(strength=Strength.PROVEN, because=tuple(because), where=at, explains=False)


def _content(events: list[Event]) -> dict[tuple[object, ...], set[int]]:
    found: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for event in events:
        for index, digest in event.get("content", ()):
            found[event["class"], event["length"], event["loader"], index].add(digest)
    return found


def _contents(evidence: Evidence, by_rank: dict[int, list[Event]]) -> tuple[int, int]:
    """Count the positions that hold the same on two ranks, and those that do not."""
    first, *others = [_content(by_rank[rank]) for rank in evidence.ranks]
    equal = unequal = 0
    for other in others:
        for place in first.keys() & other.keys():
            meets = bool(first[place] & other[place])
            equal, unequal = equal + meets, unequal + (not meets)
    return equal, unequal


def _elsewhere(by_rank: dict[int, list[Event]]) -> tuple[int, int]:
    """Count samples that another rank has at another position only; and those twice on a rank.

    A data set that holds everything twice has the second copies at one and the same distance.
    """
    mine, *others = [_places(events) for events in by_rank.values()]
    repeated = sum(len(places) > 1 for places in mine.values())
    count, distances = 0, set()
    for other in others:
        for digest in mine.keys() & other.keys():
            if not mine[digest] & other[digest]:
                count += 1
                distances.add(min(mine[digest]) - min(other[digest]))
    return (count if len(distances) > 2 else 0), repeated


def _places(events: list[Event]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event["class"] == events[0]["class"] and event["length"] == events[0]["length"]:
            for index, digest in event.get("content", ()):
                found[digest].add(index)
    return found


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
    reduced = [e for e in evidence.events("reduced", rank) if e["step"] == step]
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
            for other in evidence.ranks:
                for train in _parts(evidence, other, trained=True):
                    found = _overlap(train, valid, rank, other)
                    if found is not None and _same_era(evidence, train, valid):
                        return found
    return None


def _parts(evidence: Evidence, rank: int, *, trained: bool) -> list[Event]:
    return [e for e in passes(evidence, rank, trained=trained) if e.get("within")]


def _same_era(evidence: Evidence, train: Event, valid: Event) -> bool:
    """Say whether the model that was evaluated is the one that was trained: no other optimizer.

    Folds of a cross-validation overlap, each with a model of its own.
    """
    own = set(train["updates"])
    between = range(min(train["began"], valid["began"]), max(train["step"], valid["step"]) + 1)
    others = (u for u in evidence.updates(train["rank"]) if u["step"] in between)
    return all(str(u["optimizer"]) in own for u in others)


def _overlap(train: Event, valid: Event, rank: int, other: int) -> Diagnosis | None:
    if train["part_of"] != valid["part_of"] or train["whole_length"] != valid["whole_length"]:
        return None
    # Without a sampler that shares positions out, each rank may have a data set of its own.
    if rank != other and not train.get("num_replicas"):
        return None
    both = set(train["within"]) & set(valid["within"])
    # Evaluating what one trains on is another thing, and wanted.
    if not both or len(both) == len(valid["within"]):
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
