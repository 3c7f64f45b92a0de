"""The claims of a scenario, one call each: name, what was found, the sentence, judge, source."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.scenario import Claim, Finding, Kind, Outcome

if TYPE_CHECKING:
    from harness.tables import Tables

HOLDS = Outcome.HOLDS
REFUTED = Outcome.REFUTED
Judge = Callable[["Tables"], Finding]


def symptom(name: str, expects: Outcome, text: str, judge: Judge, source: str = "") -> Claim:
    """Return a claim about what a user sees."""
    return _claim(Kind.SYMPTOM, name, expects, text, judge, source)


def mechanism(name: str, expects: Outcome, text: str, judge: Judge, source: str = "") -> Claim:
    """Return a claim about why it happens."""
    return _claim(Kind.MECHANISM, name, expects, text, judge, source)


def remedy(name: str, expects: Outcome, text: str, judge: Judge, source: str = "") -> Claim:
    """Return a claim about what helps."""
    return _claim(Kind.REMEDY, name, expects, text, judge, source)


def cost(name: str, expects: Outcome, text: str, judge: Judge, source: str = "") -> Claim:
    """Return a claim about what it takes."""
    return _claim(Kind.COST, name, expects, text, judge, source)


def _claim(kind: Kind, name: str, expects: Outcome, text: str, judge: Judge, source: str) -> Claim:
    return Claim(name=name, kind=kind, text=text, expects=expects, judge=judge, source=source)
