"""A cause: what a user sees, why, how to confirm it, the fix; and the rule that recognises it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from harness.watch.evidence import Evidence


class Strength(IntEnum):
    """How much the evidence says."""

    FACT = 1
    """Worth knowing, no fault by itself: it is shown and alarms nobody."""
    LIKELY = 2
    """It fits, and other causes fit as well; how to confirm is shown with it."""
    PROVEN = 3
    """What was observed has no other cause: the program was seen doing it."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a rule concludes from the evidence."""

    strength: Strength
    because: tuple[str, ...]
    """Sentences on what was observed, with numbers."""
    where: str | None = None
    """`path:line` in the user's code, if known."""
    step: int | None = None
    """Update from which on, counted from 0; None if the divergence says it."""
    ranks: tuple[int, ...] = ()
    """Ranks that do it, if not all."""
    tensor: str | None = None
    """The first tensor concerned, where the divergence does not say it."""
    explains: bool = True
    """Whether it explains the divergence, if there is one; else it stands beside it."""
    cause: str = ""
    """Name of the cause; filled in for the rule."""


Rule = Callable[[Evidence], Diagnosis | None]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """An entry of the catalogue."""

    name: str
    family: str
    sees: str
    """What a user sees."""
    why: str
    """The mechanism."""
    confirm: str
    """What to do to be sure."""
    change: str
    """What to change, in a few words that fit into the first line of an answer."""
    fix: str
    """A few lines of code."""
    reported: tuple[str, ...]
    """`owner/repository#number`, where people have met it."""
    rule: Rule

    def diagnose(self, evidence: Evidence) -> Diagnosis | None:
        """Return what the evidence says of this cause, or None."""
        found = self.rule(evidence)
        if found is None:
            return None
        return replace(found, cause=self.name)


_CATALOGUE: dict[str, Cause] = {}


def cause(
    *,
    family: str,
    sees: str,
    why: str,
    confirm: str,
    change: str,
    fix: str,
    reported: tuple[str, ...] = (),
) -> Callable[[Rule], Rule]:
    """Enter a rule into the catalogue, under its own name, with the texts around it."""

    def enter(rule: Rule) -> Rule:
        name = rule.__name__
        assert name not in _CATALOGUE, f"two causes are named {name}"
        _CATALOGUE[name] = Cause(
            name=name,
            family=family,
            sees=sees,
            why=why,
            confirm=confirm,
            change=change,
            fix=fix.strip("\n"),
            reported=reported,
            rule=rule,
        )
        return rule

    return enter


def entered() -> dict[str, Cause]:
    """Return the causes whose modules have been imported, by name."""
    return _CATALOGUE


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names as a sentence lists them: `a, b and c`, or `a, b and 7 more`."""
    shown = list(names)
    if len(names) > most:
        shown = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
