"""Random numbers that are equal on all ranks where they should differ."""

from __future__ import annotations

from harness.causes.across import Side, averages, same, side_by_side
from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence

_DEVICES = ("torch", "cuda")
"""The generators that layers draw from."""
_OF_SAMPLES = {"torch": "torch's generator", "python": "Python's", "numpy": "NumPy's"}
"""Those that a data set draws from, on the processor."""


def _same_masks(evidence: Evidence, *, layers: bool = True) -> list[Side]:
    """Return the looks at which layers drew the same numbers on all ranks, if it is all of them.

    Or, of models without such layers, at which the script's own code in forward did.
    """
    looks = [
        side
        for side in side_by_side(evidence, "inputs", "module", "update")
        if all(averages(e, evidence) and bool(e["random"]) is layers for e in side.values())
    ]
    drawn = [
        (side, name)
        for side in looks
        for name in _DEVICES
        if all(e["before"].get(name) != e["after"].get(name) for e in side.values())
    ]
    alike = all(same(e["before"].get(name) for e in side.values()) for side, name in drawn)
    return [side for side, _ in drawn] if alike else []


def _restored_everywhere(evidence: Evidence) -> str | None:
    """Return where all ranks set the same state of a generator, or None."""
    states = {
        rank: [(e["state"], e["at"]) for e in evidence.events("restored", rank)]
        for rank in evidence.ranks
    }
    if not states or not all(states.values()):
        return None
    common = set.intersection(*({state for state, _ in own} for own in states.values()))
    return next((at for state, at in states[evidence.ranks[0]] if state in common), None)


def _drawing(looks: list[Side]) -> str:
    kinds = next(iter(looks[0].values()))["random"]
    return (
        f"{', '.join(kinds)} drew from the same state of the generator on all ranks, at each of "
        f"the {len(looks)} updates that were looked at"
    )


@cause(
    family="randomness",
    sees="Nothing fails; regularisation is weaker than on one GPU.",
    why="All ranks were given the same seed, so that dropout drops the same units for the sample "
    "at the same place of each rank's batch.",
    confirm="Print torch.rand(1) on each rank before the first forward pass: it must differ.",
    change="seed with seed + rank once the model is made",
    fix="""
torch.manual_seed(seed)            # equal weights
model = DDP(build())
torch.manual_seed(seed + rank)     # from here on randomness of its own
""",
    reported=("huggingface/transformers#31412", "facebookresearch/fastMRI#123"),
)
def rng_not_decorrelated(evidence: Evidence) -> Diagnosis | None:
    """Recognise dropout with the same random state on all ranks."""
    looks = _same_masks(evidence)
    if _restored_everywhere(evidence) is not None:
        return None
    if looks:
        return Diagnosis(strength=Strength.PROVEN, because=(_drawing(looks),), explains=False)
    return _same_augmentation(evidence) or _same_noise(evidence)


def _same_augmentation(evidence: Evidence) -> Diagnosis | None:
    """Recognise samples that are read with the same random numbers on all ranks."""
    looks = side_by_side(evidence, "draws", "number", "worker", "class")
    alike: list[Side] = []
    drawn: set[str] = set()
    for side in looks:
        events = list(side.values())
        names = [
            name
            for name in _OF_SAMPLES
            # NumPy's may have been imported for the first draw of all.
            if all(name in e["before"] and e["before"][name] != e["after"][name] for e in events)
        ]
        # As many draws from the same state end in the same one; seeding by sample does not.
        if not all(
            same(e[when][name] for e in events) for name in names for when in ("before", "after")
        ):
            return None
        if names and not same(e["indices"] for e in events):
            alike.append(side)
            drawn.update(names)
    if not alike:
        return None
    first = alike[0][evidence.ranks[0]]
    kinds = " and ".join(_OF_SAMPLES[name] for name in _OF_SAMPLES if name in drawn)
    times = "the one time" if len(alike) == 1 else f"each of the {len(alike)} times"
    by = "" if first["worker"] is None else ", by the workers of the loader"
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"reading other samples on each rank{by}, {first['class']} drew the same numbers on "
            f"all of them from {kinds}, {times} that this was looked at",
        ),
        where=first["at"],
        explains=False,
    )


def _same_noise(evidence: Evidence) -> Diagnosis | None:
    """Note numbers that forward draws itself: which layers to skip, say, may be agreed on."""
    looks = _same_masks(evidence, layers=False)
    if len(looks) < 2:
        return None
    return Diagnosis(
        strength=Strength.FACT,
        because=(
            "the forward pass drew from the same state of the generator on all ranks, at each of "
            f"the {len(looks)} updates that were looked at: noise is the same on all of them",
        ),
        explains=False,
    )


@cause(
    family="randomness",
    sees="After a resume all ranks drop the same units, and augment alike.",
    why="The checkpoint holds the random state of one rank, and every rank restores it.",
    confirm="Print torch.rand(1) on each rank after the restore: it must differ.",
    change="save and restore a random state for each rank",
    fix="""
states = [None] * world_size
dist.all_gather_object(states, torch.get_rng_state())      # when saving
torch.set_rng_state(checkpoint["rng"][rank])               # when loading
""",
    reported=("huggingface/transformers#11582", "huggingface/transformers#17032"),
)
def rng_restored_from_rank0(evidence: Evidence) -> Diagnosis | None:
    """Recognise the same random state restored on all ranks, and dropout that draws from it."""
    at = _restored_everywhere(evidence)
    if evidence.world_size < 2 or at is None:
        return None
    began = min(e["step"] for e in evidence.events("restored"))
    looks = [
        side
        for side in side_by_side(evidence, "inputs", "module", "update")
        if all(e["update"] >= began and averages(e, evidence) for e in side.values())
    ]
    drawn = [
        side
        for side in looks
        if all(e["before"]["torch"] != e["after"]["torch"] and e["random"] for e in side.values())
    ]
    if not drawn or not all(same(e["before"]["torch"] for e in s.values()) for s in drawn):
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=("all ranks set the same state of torch's generator", _drawing(drawn)),
        where=at,
        step=began,
        explains=False,
    )
