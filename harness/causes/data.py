"""Samples that are not shared out as the user believes."""

from __future__ import annotations

from collections import defaultdict

from harness.causes.across import averages, each_rank, passes, same, side_by_side
from harness.causes.cause import Diagnosis, Strength, cause
from harness.causes.streams import common_stream
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
            if first is event:
                continue
            looked_at, equal = _meeting(first, event)
            if looked_at and not equal and first["dataset"] != event["dataset"]:
                # Another part of the data, which happens to be as large.
                before[key] = event
            else:
                return Diagnosis(
                    # Augmentation, or a data set that has been filled anew.
                    strength=Strength.LIKELY if looked_at and not equal else Strength.PROVEN,
                    because=(
                        f"passes {first['number']} and {event['number']} over the loader have the "
                        f"same {event['count']} indices in the same order; DistributedSampler "
                        f"shuffles, and is at epoch {event['epoch']} in both",
                    ),
                    where=event["at"],
                    step=event["began"],
                    explains=False,
                )
    return None


def _meeting(one: Event, other: Event) -> tuple[int, int]:
    """Count the indices whose content was looked at in both passes, and those equal in both."""
    mine, theirs = dict(one.get("content", ())), dict(other.get("content", ()))
    common = mine.keys() & theirs.keys()
    return len(common), sum(mine[index] == theirs[index] for index in common)


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
    whole = _whole_on_each(evidence, looks[0][evidence.ranks[0]]["count"])
    return whole if whole is not None else common_stream(evidence)


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
        # Drawn with replacement, as many draws as there are samples are no epoch.
        distinct = len(event["indices"]) * event.get("every", 1)
        if event["indices"] and distinct < 0.9 * event["count"]:
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
        for place in mine.keys() & other.keys():
            if not mine[place] & other[place]:
                count += 1
                distances.add(min(mine[place]) - min(other[place]))
    return (count if len(distances) > 2 else 0), repeated


def _places(events: list[Event]) -> dict[tuple[int, int], set[int]]:
    """Return where each content is in each pass: between passes a data set may be reordered."""
    like_first = [e for e in events if all(e[k] == events[0][k] for k in ("class", "length"))]
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for number, event in enumerate(like_first):
        for index, digest in event.get("content", ()):
            found[number, digest].add(index)
    return found
