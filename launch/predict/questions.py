"""What is asked: a claim, or an article's statement, about a run with fresh parameters."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import scenarios
from harness.errors import UsageError
from harness.parameters import build, violations
from harness.scenario import Scenario
from launch.compose import values
from launch.predict.dimensions import Dimension, shelves
from launch.statements import Settling, merged, settling, statements

RANKS = (2, 3, 4)
"""Numbers of ranks that are drawn from: each starts in seconds on two cores."""
PRECISION = ("permutations", "seeds", "repeats", "trials", "draws")
"""Parameters that say how well something is measured, not what; they keep their value."""
SPREAD = (0.75, 1.5)
"""Factor on the default value of a parameter that is drawn anew."""
ATTEMPTS = 20


@dataclass(frozen=True, kw_only=True)
class Topic:
    """What can be asked about a scenario: one claim, or a statement that several claims decide."""

    scenario: str
    id: str
    """Name of the claim, or id of the statement."""
    text: str
    by: tuple[Settling, ...]

    def outcome(self, outcomes: Mapping[str, str]) -> str:
        """Return holds, refuted, partly or unknown from what a run says of each claim."""
        return merged([item.of(outcomes.get(item.claim, "unknown")) for item in self.by])

    @property
    def expected(self) -> str:
        """What this project found."""
        return self.outcome({item.claim: item.expects.value for item in self.by})

    @property
    def key(self) -> str:
        """What an answers file calls it."""
        return f"{self.scenario}.{self.id}"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A topic with the run it is asked about."""

    dimension: Dimension
    topic: Topic
    gpus: int
    seed: int
    params: Mapping[str, Any]
    """All parameters of the scenario."""
    drawn: Sequence[str]
    """Names of those that do not have their default."""


def topics(name: str) -> list[Topic]:
    """Return what can be asked about a scenario; each of its claims is in one topic or more."""
    found = []
    shared: set[str] = set()
    for id_, items in settling([name]).items():
        if len(items) > 1 and id_ in statements():
            says = statements()[id_].says
            found.append(Topic(scenario=name, id=id_, text=says, by=tuple(items)))
            shared |= {item.claim for item in items}
    for claim in scenarios.load(name).claims:
        if claim.name not in shared:
            item = Settling(scenario=name, claim=claim.name, expects=claim.expects, contrary=False)
            found.append(Topic(scenario=name, id=claim.name, text=claim.text, by=(item,)))
    return found


def base_rates(names: Iterable[str]) -> dict[str, float]:
    """Return how often a drawn question has each answer, by what this project found.

    Dimensions are drawn alike often, scenarios alike within a dimension, topics within a scenario.
    """
    rates = {"holds": 0.0, "refuted": 0.0, "partly": 0.0}
    filled = [found for found in shelves(names).values() if found]
    for found in filled:
        for name in found:
            asked = topics(name)
            for topic in asked:
                rates[topic.expected] += 1 / (len(filled) * len(found) * len(asked))
    return rates


def draw(
    names: Iterable[str],
    rng: random.Random,
    *,
    each: int = 2,
    only: Dimension | None = None,
) -> list[Question]:
    """Return `each` questions of every dimension, each about another scenario.

    Raises:
        UsageError: if a dimension has no scenario.
    """
    drawn = []
    for dimension, found in shelves(names).items():
        if only not in (None, dimension):
            continue
        if not found:
            raise UsageError(f"no scenario asks for {dimension.value}")
        for name in rng.sample(sorted(found), min(each, len(found))):
            drawn.append(_question(name, dimension, rng))
    return drawn


def _question(name: str, dimension: Dimension, rng: random.Random) -> Question:
    scenario = scenarios.load(name)
    topic = rng.choice(topics(name))
    seed = rng.randrange(2**31)
    default = values(name)
    legal = [n for n in RANKS if _problems(scenario, default, n) == []]
    gpus = rng.choice(legal or [scenario.min_ranks])
    params = default
    for _ in range(ATTEMPTS):
        params = vary(scenario, default, rng)
        if not _problems(scenario, params, gpus):
            break
    else:
        params = default
    changed = [key for key in params if params[key] != default[key]]
    return Question(
        dimension=dimension, topic=topic, gpus=gpus, seed=seed, params=params, drawn=changed
    )


def vary(scenario: Scenario, default: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the values with one or two numbers drawn anew, within their legal bounds."""
    fields = {item.name: item.metadata for item in dataclasses.fields(scenario.params)}
    free = [
        name
        for name, value in default.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and value
        and name not in PRECISION
        and "values" not in fields.get(name, {})
    ]
    result = dict(default)
    for name in rng.sample(free, min(len(free), rng.choice((1, 2)))):
        rules: Mapping[str, Any] = fields.get(name, {})
        factor = math.exp(rng.uniform(math.log(SPREAD[0]), math.log(SPREAD[1])))
        value = default[name] * factor
        whole = isinstance(default[name], int)
        value = round(value) if whole else float(f"{value:.2g}")
        value = max(value, rules.get("low", value))
        value = min(value, rules.get("high", value))
        result[name] = int(value) if whole else float(value)
    return result


def _problems(scenario: Scenario, params: Mapping[str, Any], gpus: int) -> list[str]:
    if gpus < scenario.min_ranks or (scenario.max_ranks and gpus > scenario.max_ranks):
        return ["not for so many ranks"]
    wrong = violations(scenario.params, params)
    return wrong or list(scenario.check(build(scenario.params, params), gpus))
