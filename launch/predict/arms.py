"""Which arms end with other weights than the reference: asked before the run, read from it after.

A set of arms says whether somebody has understood what a change of code does, beyond the claim that
happens to be asked for. It is scored against somebody who tosses a coin for each arm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import scenarios
from harness.errors import HarnessError, MissingRecord, UsageError, did_you_mean
from harness.floor import EPS, FAULT
from harness.plan import Layout
from harness.rounding import rounding
from harness.scenario import Arm, Role, Scenario
from harness.tables import Tables, relative_l2
from launch.corpus.record import STATE
from launch.predict.questions import Topic

NAMES = tuple(metric.removesuffix(".digest") for metric in STATE)
NONE = ("none", "-", "0")
"""What is typed for no arm at all."""


def reference(scenario: Scenario) -> Arm | None:
    """Return the arm that the others are compared with."""
    return next((arm for arm in scenario.arms if arm.role is Role.REFERENCE), None)


def asked(scenario: Scenario) -> tuple[str, ...]:
    """Return the arms whose weights can be told from the reference's; none if that asks nothing.

    Said before anything runs: weights have to be recorded by name in the scenario's own file.
    """
    first = reference(scenario)
    file = scenario.run.__globals__.get("__file__")
    if first is None or file is None:
        return ()
    text = Path(str(file)).read_text(encoding="utf-8")
    if not re.search(rf"(snapshot|digest)\([^)]*\b({'|'.join(NAMES)})=", text):
        return ()
    others = tuple(arm.name for arm in scenario.arms if arm is not first and not arm.isolated)
    return others if len(others) > 1 else ()


def typed(words: str, legal: Sequence[str]) -> tuple[str, ...] | None:
    """Return the arms that were typed; None for nothing.

    Raises:
        ValueError: if one is not asked about; names the nearest.
    """
    named = words.replace(",", " ").split()
    if not named:
        return None
    if len(named) == 1 and named[0].lower() in NONE:
        return ()
    for name in named:
        if name not in legal:
            raise ValueError(f"no arm {name!r} here{did_you_mean(name, legal)}; or type none")
    return tuple(dict.fromkeys(named))


def check(named: Sequence[str], topic: Topic) -> None:
    """Refuse names of an answers file that are no arms of the question.

    Raises:
        UsageError: names the nearest, and what could have been said.
    """
    legal = asked(scenarios.load(topic.scenario))
    for name in named:
        if name not in legal:
            raise UsageError(
                f"no arm {name!r} to differ in {topic.key}{did_you_mean(name, legal)}\n"
                f"legal: {', '.join(legal) or 'none, its weights are not recorded'}"
            )


def differing(layout: Layout, scenario: Scenario) -> Mapping[str, bool]:
    """Return, for each arm that was through, whether its weights end elsewhere on any rank.

    What is rounding is told by the permuted repeats of the reference; where it has none, by half
    the digits of its dtype: rounding leaves more of them alike, and a fault fewer.
    """
    first = reference(scenario)
    if first is None:
        return {}
    try:
        tables = Tables.read(layout)
        tables.require(first.name)
    except HarnessError:
        return {}
    found = {}
    for name in asked(scenario):
        try:
            tables.require(name)
            found[name] = any(
                _apart(tables, first.name, name, tensor)
                for tensor in NAMES
                if tables.has(first.name, f"{tensor}.digest")
            )
        except MissingRecord:
            continue
    return found


def _apart(t: Tables, first: str, arm: str, tensor: str) -> bool:
    last, phase = _last(t, first, tensor)
    due = t.value(first, f"{tensor}.digest", step=last, phase=phase)
    ranks = t.ranks(arm)
    if all(
        t.value(arm, f"{tensor}.digest", step=last, phase=phase, rank=rank) == due for rank in ranks
    ):
        return False
    right = t.snapshot(first, tensor, step=last, phase=phase)
    gaps = [
        relative_l2(t.snapshot(arm, tensor, step=last, phase=phase, rank=rank), right)
        for rank in ranks
    ]
    worst = max(gaps, key=lambda gap: math.inf if math.isnan(gap) else gap)
    try:
        bound = FAULT * rounding(t, first, tensor, step=last, phase=phase).value
    except MissingRecord:
        narrow = bool((right.astype("float32") == right).all())
        bound = math.sqrt(EPS["float32" if narrow else "float64"])
    return not worst < bound


def _last(t: Tables, arm: str, tensor: str) -> tuple[int, str]:
    """Return the last step and phase at which an arm recorded a tensor."""
    for step, phase in reversed(t.moments(arm)):
        try:
            t.value(arm, f"{tensor}.digest", step=step, phase=phase)
        except MissingRecord:
            continue
        return step, phase
    raise MissingRecord(f"arm {arm} never recorded {tensor}")


def jaccard(said: Collection[str], true: Collection[str]) -> float:
    """Return what two sets share, over all that is in either; 1 if both are empty."""
    union = set(said) | set(true)
    return len(set(said) & set(true)) / len(union) if union else 1.0


def skill(said: Collection[str], found: Mapping[str, bool]) -> float | None:
    """Return how much better than a coin for each arm: 1 is the very set, 0 as good as the coin.

    Arms that could not be compared count for neither; None where that leaves less than two.
    """
    if len(found) < 2:
        return None
    true = [name for name, apart in found.items() if apart]
    return 1.0 - (1.0 - jaccard([name for name in said if name in found], true)) / (
        1.0 - _coin(len(true), len(found) - len(true))
    )


def _coin(inside: int, outside: int) -> float:
    """Return how well a coin for each arm agrees, on average, with a set of `inside` arms."""
    total = 0.0
    for hits in range(inside + 1):
        for wrong in range(outside + 1):
            union = inside + wrong
            share = hits / union if union else 1.0
            total += math.comb(inside, hits) * math.comb(outside, wrong) * share
    return total / 2.0 ** (inside + outside)
