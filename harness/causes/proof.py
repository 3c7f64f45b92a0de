"""A rule that infers from bookkeeping is proven where an audit has recomputed the gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from harness.causes.audited import (
    MICRO_BATCHES,
    RANKS,
    Audited,
    counts,
    counts_follow_rows,
    distance,
    times,
    uneven,
)
from harness.causes.cause import Diagnosis, Rule, Strength
from harness.watch.evidence import Evidence

Look = Callable[[Evidence], Audited | None]


def proven_by(look: Look, *, alone: bool) -> Callable[[Rule], Rule]:
    """Let an audit prove what a rule finds likely.

    Args:
        look: returns the audits that prove it.
        alone: an audit suffices where the rule itself sees nothing.
    """

    def put(rule: Rule) -> Rule:
        @functools.wraps(rule)
        def with_audits(evidence: Evidence) -> Diagnosis | None:
            found, audited = rule(evidence), look(evidence)
            if audited is None or (found is None and not alone):
                return found
            sentence = _sentence(audited)
            if found is None:
                return Diagnosis(
                    strength=Strength.PROVEN,
                    because=(sentence,),
                    where=audited.where,
                    step=audited.step,
                    explains=False,
                )
            # What is a fact only, as it is made up for elsewhere, stays one.
            likely = found.strength == Strength.LIKELY
            strength = Strength.PROVEN if likely else found.strength
            return replace(found, strength=strength, because=(*found.because, sentence))

        return with_audits

    return put


def tokens(evidence: Evidence) -> Audited | None:
    """Look for ranks that weigh alike with unequal numbers of tokens, several to a row."""
    found = uneven(evidence, RANKS)
    return found if found is not None and _tokens(found) else None


def valid_labels(evidence: Evidence) -> Audited | None:
    """Look for ranks that weigh alike with unequal numbers of labels, of equal batches."""
    found = uneven(evidence, RANKS)
    equal = found is not None and len(set(_rows(found).values())) == 1
    return found if found is not None and equal and not _tokens(found) else None


def batches(evidence: Evidence) -> Audited | None:
    """Look for ranks that weigh alike with batches of unequal size."""
    found = uneven(evidence, RANKS)
    equal = found is not None and len(set(_rows(found).values())) == 1
    return found if found is not None and not equal and not _tokens(found) else None


def micro_batches(evidence: Evidence) -> Audited | None:
    """Look for micro-batches that weigh alike with unequal counts."""
    return uneven(evidence, MICRO_BATCHES)


def world_times(evidence: Evidence) -> Audited | None:
    """Look for gradients exactly world_size times those of one process."""
    return times(evidence, float(evidence.world_size)) if evidence.world_size > 1 else None


def world_part(evidence: Evidence) -> Audited | None:
    """Look for gradients exactly 1/world_size of those of one process."""
    return times(evidence, 1 / evidence.world_size) if evidence.world_size > 1 else None


def _rows(found: Audited) -> dict[int, int]:
    return {int(rank): sum(row) for rank, row in found.first["rows"].items()}


def _tokens(found: Audited) -> bool:
    rows = _rows(found)
    more = all(count > rows[rank] for rank, count in counts(found.first).items())
    unequal = len(set(rows.values())) > 1
    return more and not (unequal and counts_follow_rows(found.first))


def _sentence(audited: Audited) -> str:
    event = audited.first
    if event["losses"][0]["weighting"] == "equal":
        return (
            f"replayed in one process, the gradient is exactly {event['factor']:.6g} times that of "
            f"one process ({audited.how_often})"
        )
    return (
        f"replayed in one process, where all of them weigh the same: {distance(event)} "
        f"({audited.how_often})"
    )
