"""What losses are divided by: ranks and micro-batches that count for more than their share.

Under DistributedDataParallel the gradient is the mean over ranks. It is that of one process if
each unit, be it a sample or a token, has the same weight in its rank's loss as on any other rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.causes import proof
from harness.causes.across import each_rank, side_by_side, usual
from harness.causes.cause import Diagnosis, Strength, cause
from harness.causes.loss_terms import Main, averaged_by_torch, main_term
from harness.watch.evidence import Evidence
from harness.watch.journal import Event

_MATERIAL = 1.1
"""Weights that differ by less, as in the last batch of an epoch, are not worth an alarm."""


def _ratio(values: Mapping[int, float]) -> float:
    least, most = min(map(abs, values.values())), max(map(abs, values.values()))
    return most / least if least else 1.0


@dataclass(frozen=True)
class Uneven:
    """Updates in which units weigh more on one rank than on another."""

    first: Mapping[int, Main]
    window: Event
    rows: Mapping[int, int]
    times: int
    looks: int

    def diagnosis(self, counted: str) -> Diagnosis:
        """Say what was counted, and what it does to the weights."""
        counts = {rank: main.count for rank, main in self.first.items()}
        ratio = _ratio({rank: main.weight for rank, main in self.first.items()})
        return Diagnosis(
            strength=Strength.LIKELY,
            because=(
                f"the loss is a mean over {each_rank(counts, '{:g}'.format)} {counted}, and ranks "
                f"are averaged alike: one weighs up to {ratio:.3g} times as much as another "
                f"({self.times} of {self.looks} updates)",
            ),
            where=next(iter(self.window.get("backward_at", ())), None),
            step=self.window["update"],
            explains=False,
        )


def _uneven(evidence: Evidence) -> Uneven | None:
    if not averaged_by_torch(evidence):
        return None
    found: list[tuple[dict[int, Main], Event]] = []
    looks = 0
    for side in side_by_side(evidence, "update", "optimizer", "update"):
        mains = {rank: main_term(window) for rank, window in side.items()}
        known = {rank: main for rank, main in mains.items() if main is not None}
        if len(known) < len(side) or any(main.weighted for main in known.values()):
            continue
        looks += 1
        means = all(main.mean for main in known.values())
        # Whoever weighs ranks in another way than by their counts has a reason for it.
        by_count = _ratio({r: m.weight * m.count for r, m in known.items()}) < 1.001
        if means and by_count and _ratio({r: m.weight for r, m in known.items()}) > _MATERIAL:
            found.append((known, side[evidence.ranks[0]]))
    if len(found) < 2 or 2 * len(found) < looks:
        return None
    first, window = found[0]
    rows = {
        event["rank"]: next(iter(event.get("rows", ())), 0)
        for event in evidence.events("update")
        if event["update"] == window["update"] and event["optimizer"] == window["optimizer"]
    }
    return Uneven(first, window, rows, len(found), looks)


@cause(
    family="normalisation",
    sees="N ranks do not train like one process on text of varying length; replicas are equal.",
    why="Each rank divides by the number of its own tokens, and ranks are averaged with equal "
    "weight: a token on a rank with few of them counts for more.",
    confirm="Run with --audit: the gradient of one process on all tokens is another one.",
    change="sum the loss, and divide by the tokens of all ranks over world_size",
    fix="""
tokens = (labels != ignore_index).sum()
dist.all_reduce(tokens)
loss = cross_entropy(logits, labels, reduction="sum") * world_size / tokens
""",
    reported=("huggingface/transformers#34242", "huggingface/transformers#34191"),
)
@proof.proven_by(proof.tokens, alone=True)
def token_count_local(evidence: Evidence) -> Diagnosis | None:
    """Recognise means over unequal numbers of tokens: several of them to a row."""
    uneven = _uneven(evidence)
    if uneven is None or not _more_than_rows(uneven):
        return None
    return uneven.diagnosis("labels")


@cause(
    family="normalisation",
    sees="N ranks do not train like one process where some labels are ignored; replicas are equal.",
    why="Each rank divides by the number of its own valid labels, and ranks are averaged with "
    "equal weight.",
    confirm="Run with --audit: the gradient of one process on all labels is another one.",
    change="sum the loss, and divide by the valid labels of all ranks over world_size",
    fix="""
valid = (labels != ignore_index).sum()
dist.all_reduce(valid)
loss = cross_entropy(logits, labels, reduction="sum") * world_size / valid
""",
)
@proof.proven_by(proof.valid_labels, alone=True)
def valid_count_mean(evidence: Evidence) -> Diagnosis | None:
    """Recognise means over unequal numbers of labels, of batches of equal size."""
    uneven = _uneven(evidence)
    if uneven is None or _more_than_rows(uneven) or len(set(uneven.rows.values())) > 1:
        return None
    return uneven.diagnosis("valid labels")


@cause(
    family="normalisation",
    sees="The result depends on how samples are spread over ranks; replicas are equal.",
    why="Every rank's mean has the weight 1/N in the average, whatever the size of its batch.",
    confirm="Run with --audit: the gradient of one process on the whole batch is another one.",
    change="weight each rank's loss by its share of the global batch",
    fix="""
size = torch.tensor(float(len(x)))
dist.all_reduce(size)
loss = criterion(model(x), y) * len(x) * world_size / size
""",
    reported=("pytorch/pytorch#67253", "pytorch/pytorch#37359"),
)
@proof.proven_by(proof.batches, alone=True)
def unequal_batches_equal_weight(evidence: Evidence) -> Diagnosis | None:
    """Recognise means over batches of unequal size."""
    uneven = _uneven(evidence)
    if uneven is None or _more_than_rows(uneven) or len(set(uneven.rows.values())) < 2:
        return None
    return uneven.diagnosis("samples")


def _more_than_rows(uneven: Uneven) -> bool:
    # With batches of equal size it is not the batches; several units to a row are tokens.
    unequal_rows = len(set(uneven.rows.values())) > 1
    more = all(m.count > uneven.rows.get(rank, 0) for rank, m in uneven.first.items())
    per_row = {m.count / max(1, uneven.rows.get(r, 0)) for r, m in uneven.first.items()}
    return more and not (unequal_rows and len(per_row) == 1)


def _micro_batches(window: Event) -> list[Main]:
    mains = [main_term(window, place) for place in range(len(window.get("loss_terms", ())))]
    return [main for main in mains if main is not None]


@cause(
    family="normalisation",
    sees="Batch 32 and 32 micro-batches of 1 give different curves; replicas are equal.",
    why="A mean of means is no mean: each micro-batch is divided by its own count, and all of them "
    "weigh the same.",
    confirm="Run with --audit: the gradient of the window as one batch is another one.",
    change="sum the losses, and divide by the count of the whole window",
    fix="""
count = sum((labels != ignore_index).sum() for _, labels in window)
for inputs, labels in window:
    loss = cross_entropy(model(inputs), labels, reduction="sum") / count
    loss.backward()
""",
    reported=("pytorch/torchtune#1875", "huggingface/transformers#34191"),
)
@proof.proven_by(proof.micro_batches, alone=True)
def accumulation_normalisation(evidence: Evidence) -> Diagnosis | None:
    """Recognise micro-batches of one update with unequal counts, each a mean."""
    for rank in evidence.ranks:
        updates = list(evidence.updates(rank))
        if len({u["optimizer"] for u in updates}) != 1:
            continue
        windows = [(u, _micro_batches(u)) for u in updates if u.get("backwards", 0) > 1]
        windows = [(u, mains) for u, mains in windows if len(mains) > 1]
        uneven = [
            (u, mains)
            for u, mains in windows
            if all(m.mean and not m.weighted for m in mains)
            and _ratio(dict(enumerate(m.factor for m in mains))) < 1.001
            and _ratio(dict(enumerate(m.weight for m in mains))) > _MATERIAL
        ]
        if len(uneven) < 2 or 2 * len(uneven) < len(windows):
            continue
        window, mains = uneven[0]
        counts = ", ".join(f"{main.count:g}" for main in mains)
        ratio = _ratio(dict(enumerate(m.weight for m in mains)))
        return Diagnosis(
            strength=Strength.LIKELY,
            because=(
                f"the micro-batches of an update have means over {counts}, and the same factor: "
                f"one unit weighs up to {ratio:.3g} times as much as another ({len(uneven)} of "
                f"{len(windows)} updates)",
            ),
            where=next(iter(window.get("backward_at", ())), None),
            step=window["update"],
            explains=False,
        )
    return None


@cause(
    family="normalisation",
    sees="The last update of an epoch is too small.",
    why="The last window has fewer micro-batches, and each is still divided by the full number.",
    confirm="Print the number of micro-batches before each update, and the divisor.",
    change="divide by the number of micro-batches that the window has",
    fix="""
left = len(loader) % accumulation
size = left if left and index >= len(loader) - left else accumulation
(loss / size).backward()
""",
)
def accumulation_tail_window(evidence: Evidence) -> Diagnosis | None:
    """Recognise a shorter window whose losses have the factor of a full one."""
    for rank in evidence.ranks:
        updates = [u for u in evidence.updates(rank) if u.get("backwards")]
        full = usual([u["backwards"] for u in updates], share=0.5)
        if full is None or full < 2 or len({u["optimizer"] for u in updates}) != 1:
            continue
        for window in updates:
            mains = _micro_batches(window)
            divided = mains and all(m.mean and abs(m.factor * full - 1) < 1e-5 for m in mains)
            if window["backwards"] < full and divided:
                return Diagnosis(
                    strength=Strength.LIKELY,
                    because=(
                        f"update {window['update']} is made of {window['backwards']} "
                        f"micro-batches, each divided by {full}",
                    ),
                    where=next(iter(window.get("backward_at", ())), None),
                    step=window["update"],
                    explains=False,
                )
    return None
