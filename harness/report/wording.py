"""How numbers, ranks and outcomes are put into words, the same in every kind of report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import MissingRecord
from harness.scenario import Claim, Finding, Outcome, Scenario, unknown
from harness.tables import Tables
from harness.verdict import Conclusion, Verdict

CONCLUSIONS = {
    Conclusion.AS_EXPECTED: ("as expected", "Every claim came out as this project found it."),
    Conclusion.UNEXPECTED: (
        "not as expected",
        "At least one claim came out otherwise than this project found it.",
    ),
    Conclusion.INCONCLUSIVE: ("inconclusive", "This run does not decide all of its claims."),
}
"""Conclusion -> (in two words, in one sentence)."""

DASH, TIMES = "\u2013", "\u00d7"
"""By name, since they are easily taken for a hyphen and a letter."""

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One claim beside what this run found about it."""

    claim: Claim
    finding: Finding

    @property
    def expected(self) -> bool:
        """True if the finding is the one this project expects."""
        return self.finding.outcome is self.claim.expects


def judged(scenario: Scenario, verdict: Verdict) -> list[Judged]:
    """Pair every claim with its finding; a claim that nobody judged is unknown."""
    absent = unknown("this claim was not judged in this run")
    return [
        Judged(claim=claim, finding=verdict.findings.get(claim.name, absent))
        for claim in scenario.claims
    ]


def tally(items: Sequence[Judged]) -> str:
    """Return how many claims came out which way: "3 claims hold, 1 is refuted, 1 unknown"."""
    count = {outcome: sum(item.finding.outcome is outcome for item in items) for outcome in Outcome}
    verbs = [
        (Outcome.HOLDS, "holds", "hold"),
        (Outcome.REFUTED, "is refuted", "are refuted"),
        (Outcome.UNKNOWN, "is unknown", "are unknown"),
    ]
    parts = [f"{count[o]} {one if count[o] == 1 else many}" for o, one, many in verbs if count[o]]
    if not parts:
        return "no claims"
    first, _, rest = parts[0].partition(" ")
    parts[0] = f"{first} {'claim' if first == '1' else 'claims'} {rest}"
    return ", ".join(parts)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number short enough for a table cell; a dash for None."""
    if value is None:
        return DASH
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value).lower()
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value):,}"
    text = f"{value:.{digits}g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def figure(value: float | str) -> str:
    """Return a figure of verdict.json, in which what is not finite is text."""
    return value if isinstance(value, str) else number(value)


def against(finding: Mapping[str, Any]) -> str:
    """Return the effect of a finding of verdict.json that has one, and what it stands against."""
    floor = finding["floor"]
    return f"{figure(finding['effect'])}, {'exact' if floor is None else f'floor {figure(floor)}'}"


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks in words, neighbours as a range: "rank 1", "ranks 0, 2"."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a}{DASH}{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs]
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(parts)


def arm_status(tables: Tables, arm: str) -> list[tuple[str, bool]]:
    """Return how the ranks of an arm ended, ranks with the same end together.

    Each entry is the text and whether it is the end that a sound run has.
    """
    try:
        ranks = tables.ranks(arm)
    except MissingRecord:
        return [("not part of this run", False)]
    ends: dict[tuple[str, bool], list[int]] = {}
    for rank in ranks:
        ends.setdefault(_end(tables, arm, rank), []).append(rank)
    return [(f"{rank_list(found)} {end}", sound) for (end, sound), found in ends.items()]


def _end(tables: Tables, arm: str, rank: int) -> tuple[str, bool]:
    try:
        stream = tables.stream(arm, rank)
    except MissingRecord:
        return "wrote no record", False
    if stream.end == "completed":
        return "completed", True
    last = f"after step {stream.rows[-1].step}" if stream.rows else "before its first step"
    what = "failed" if stream.end else "was cut off"
    return f"{what} {last}" + (f": {stream.error}" if stream.error else ""), False


def printable(text: str) -> str:
    """Return the text with what XML or UTF-8 cannot carry, and turns of direction, made visible."""
    return _CONTROL.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if 0x202A <= code <= 0x2069:
        # Left in, it would turn the direction of everything after it.
        return f"[U+{code:04X}]"
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"
