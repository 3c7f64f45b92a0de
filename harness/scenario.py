"""What a failure case is made of: claims, arms, parameters, and the functions `run` and `judge`.

A scenario module holds data and functions only; nothing registers itself. It imports torch inside
`run` (and in what only `run` calls), so that listing, validating and judging need no torch.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

Scalar = str | int | float | bool | None
"""What an option, a parameter or a piece of evidence may hold: what JSON can carry."""


class Kind(str, Enum):
    """What a claim is about."""

    SYMPTOM = "symptom"
    """What a user sees."""
    MECHANISM = "mechanism"
    """Why it is said to happen."""
    REMEDY = "remedy"
    """What is said to help."""
    COST = "cost"
    """What it is said to take."""


class Outcome(str, Enum):
    """What a run says about one claim."""

    HOLDS = "holds"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


class Role(str, Enum):
    """What an arm is for."""

    REFERENCE = "reference"
    """What is right: often one process on the whole global batch."""
    FAULTY = "faulty"
    """The failure as a user would have written it."""
    FIXED = "fixed"
    """The failure with one remedy applied; every remedy is an arm."""
    CONTROL = "control"
    """As noisy as the faulty arm, without the fault."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one run says about one claim, with the numbers it rests on."""

    outcome: Outcome
    reason: str
    """One sentence a person can repeat to a colleague; numbers included."""
    effect: float | None = None
    """The measured size, in `unit`; None where the claim is about something countable or exact."""
    floor: float | None = None
    """The rounding floor measured in the same run, in `unit`; None where the decision is exact."""
    unit: str = ""
    """What `effect` and `floor` count, in words: "relative L2 distance", "collectives"."""
    evidence: Mapping[str, Scalar] = field(default_factory=dict)
    """The numbers and digests behind the outcome, by name."""

    @property
    def multiple(self) -> float | None:
        """How many floors the effect is; None where there is no floor to compare with."""
        if self.effect is None or self.floor is None or math.isnan(self.floor):
            return None
        if self.floor == 0.0:
            return math.inf if self.effect else 0.0
        return self.effect / self.floor


def holds(reason: str, **numbers: Any) -> Finding:
    """Return a finding that the claim holds; `numbers` are the fields of `Finding`."""
    return Finding(outcome=Outcome.HOLDS, reason=reason, **numbers)


def refuted(reason: str, **numbers: Any) -> Finding:
    """Return a finding that the claim is false; `numbers` are the fields of `Finding`."""
    return Finding(outcome=Outcome.REFUTED, reason=reason, **numbers)


def unknown(reason: str, **numbers: Any) -> Finding:
    """Return a finding that this run cannot decide the claim; `reason` says what is missing."""
    return Finding(outcome=Outcome.UNKNOWN, reason=reason, **numbers)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence that can be false, and the pure function that decides it from the tables."""

    name: str
    kind: Kind
    text: str
    """The claim as somebody would assert it, in one sentence."""
    expects: Outcome
    """What this project found; a run that finds otherwise exits with code 10."""
    judge: Callable[[Tables], Finding]
    source: str = ""
    """Where the claim is made, for example "pytorch/pytorch#22049"."""
    settles: tuple[str, ...] = ()
    """Ids of the statements in scenarios/articles.yaml that the finding decides; `~A27` where the
    claim asserts the contrary of the statement."""
    before: Mapping[str, Outcome] = field(default_factory=dict)
    """What this project found with torch before a version, where torch itself has changed:
    {"2.10": HOLDS}. Of several that a torch is older than the oldest counts."""

    def on(self, torch: str) -> Claim:
        """Return the claim with what is expected of it on that version of torch."""
        older = [limit for limit in self.before if _release(torch) < _release(limit)]
        if not older:
            return self
        return replace(self, expects=self.before[min(older, key=_release)], before={})


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of running the same training loop."""

    name: str
    role: Role
    about: str
    """What differs from the other arms, in a few words."""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    """What `run` branches on."""
    ranks: int | None = None
    """How many ranks take part; None = all of them, 1 = one process on the global batch."""
    repeats: int | str = 1
    """A/A repeats in the same processes, or the name of the parameter that says how many."""
    isolated: bool = False
    """True if the arm may hang or break its process: it then gets processes of its own."""

    def __post_init__(self) -> None:
        """Make the options read-only."""
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    def __getitem__(self, option: str) -> Any:
        """Return one option; KeyError if the arm has none of that name."""
        return self.options[option]

    def get(self, option: str, default: Any = None) -> Any:
        """Return one option, or `default`."""
        return self.options.get(option, default)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A failure of distributed training that can be run, with what is claimed about it."""

    title: str
    """What goes wrong, in one line of at most 90 characters."""
    family: str
    """buffers, normalisation, clipping, ... : the shelf it stands on."""
    cause: str
    """Name of its cause in the catalogue of causes; empty where only a belief is wrong."""
    claims: Sequence[Claim]
    arms: Sequence[Arm]
    params: type
    """A frozen dataclass with types only; its values live in conf/scenario/<name>.yaml."""
    run: Callable[[Rank, Arm, Any], None]
    headline: Callable[[Mapping[str, Finding]], str]
    """What is true, in one sentence, from the findings by claim name."""
    min_ranks: int = 2
    max_ranks: int | None = None
    check: Callable[[Any, int], Sequence[str]] = lambda params, ranks: ()
    """Say what is wrong with parameters that are each legal but do not go together, or not with so
    many ranks; one sentence each, with what to type. Nothing is started if it says anything."""
    differs: Sequence[str] = ("run",)
    """Names of the module's functions that hold the branch in which the arms differ."""
    plots: Sequence[Plot] = ()
    """What a person would rather look at than read."""

    def on(self, torch: str | None) -> Scenario:
        """Return the scenario with what is expected on that version of torch; None = the newest."""
        claims = [claim.on(torch) if torch else claim for claim in self.claims]
        same = all(map(operator.is_, claims, self.claims))
        return self if same else replace(self, claims=claims)

    def arm(self, name: str) -> Arm:
        """Return the arm of that name; KeyError if there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise KeyError(name)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One chart of the report: a metric over the steps, one line per arm and rank."""

    metric: str
    title: str
    arms: Sequence[str] = ()
    """Names of the arms to draw; empty = all that have the metric."""
    phase: str | None = None
    log: bool = False
    """True for a logarithmic value axis."""
    floor: Callable[[Tables], float] | None = None
    """Upper edge of the rounding floor, drawn as a band; None = no band."""
    unit: str = ""


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor of a version such as 2.13.0+cpu or 2.14.0a0+git1234567."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def at_least(low: float) -> dict[str, float]:
    """Return field metadata for a parameter with a smallest legal value."""
    return {"low": low}


def between(low: float, high: float) -> dict[str, float]:
    """Return field metadata for a parameter with a smallest and a largest legal value."""
    return {"low": low, "high": high}


def one_of(*values: Scalar) -> dict[str, tuple[Scalar, ...]]:
    """Return field metadata for a parameter with a fixed set of legal values."""
    return {"values": values}
