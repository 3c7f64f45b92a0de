"""What somebody predicts: probabilities of each outcome, the size of the effect, arms that differ.

An answers file holds them as JSON, by the question's key or for all others. "differ" lists the arms
that end with other weights than the reference, [] if none does:

    {"answers": {"loss_gap.digest_decides": {"holds": 0.8, "refuted": 0.2}},
     "default": {"holds": 0.4, "refuted": 0.5, "partly": 0.1, "low": 1e-6, "high": 1}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UsageError, did_you_mean
from launch.predict.questions import Topic
from launch.predict.score import OUTCOMES

CLOSE = 0.02
"""Probabilities that add up to 1 within this are taken as meant, and scaled."""
FORM = f"its form: {__doc__}".rstrip()
LETTERS = {"h": "holds", "r": "refuted", "p": "partly"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One prediction."""

    probabilities: Mapping[str, float]
    interval: tuple[float, float] | None = None
    """Smallest and largest effect, 80 % sure; None = nothing said about it."""
    differ: tuple[str, ...] | None = None
    """Arms that end with other weights than the reference; None = nothing said about it."""

    def __post_init__(self) -> None:
        """Scale what is nearly whole; refuse the rest."""
        given = self.probabilities
        total = sum(given.values())
        if set(given) - set(OUTCOMES) or any(not 0 <= value <= 1 for value in given.values()):
            raise ValueError(f"probabilities are from 0 to 1, of {', '.join(OUTCOMES)}")
        if abs(total - 1) > CLOSE:
            raise ValueError(f"the probabilities add up to {total:g}, not to 1")
        whole = {name: given.get(name, 0.0) / total for name in OUTCOMES}
        object.__setattr__(self, "probabilities", whole)
        if self.interval is not None:
            low, high = sorted(self.interval)
            if low < 0:
                raise ValueError("effects are sizes: 0 or more")
            object.__setattr__(self, "interval", (low, high))


def read(
    path: Path, rates: Mapping[str, float], legal: Collection[str]
) -> Callable[[Topic], Answer]:
    """Return what a file answers; a question it does not name and has no default for, by the rates.

    Args:
        path: the file.
        rates: how often each outcome comes.
        legal: the keys of all questions there are, drawn this time or not.

    Raises:
        UsageError: if the file cannot be read or an answer will not do; names it.
    """
    try:
        data = _mapping(json.loads(path.read_text(encoding="utf-8")), "the file")
        _keys(data, ("answers", "default"), "the file")
        answers = _mapping(data.get("answers", {}), "answers")
        _keys(answers, legal, "the questions; keys are printed by questions=true")
        named = {key: _answer(item, key) for key, item in answers.items()}
        default = _answer(data.get("default") or dict(rates), "default")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}\n{FORM}") from error
    except ValueError as error:
        raise UsageError(f"cannot use {path}: {error}\n{FORM}") from error
    return lambda topic: named.get(topic.key, default)


def _answer(item: Any, where: str) -> Answer:
    typed = dict(_mapping(item, where))
    _keys(typed, (*OUTCOMES, "low", "high", "differ"), where)
    differ = _names(typed.pop("differ", None), f"differ of {where}")
    if ("low" in typed) != ("high" in typed):
        raise ValueError(f"{where} has one of low and high: an interval needs both")
    numbers = {name: _number(value, f"{name} of {where}") for name, value in typed.items()}
    interval = (numbers["low"], numbers["high"]) if "low" in numbers else None
    given = {name: numbers[name] for name in OUTCOMES if name in numbers}
    try:
        return Answer(probabilities=given, interval=interval, differ=differ)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {json.dumps(value)[:40]}, and is to be {{...}}")
    return value


def _names(value: Any, what: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{what} is {json.dumps(value)[:40]}, and is to be a list of arms")
    return tuple(value)


def _keys(typed: Mapping[str, Any], legal: Collection[str], where: str) -> None:
    for name in typed:
        if name not in legal:
            raise ValueError(f"no key {name!r} in {where}{did_you_mean(name, legal)}")


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{what} is {json.dumps(value)[:40]}, and is to be a number")
    return float(value)


def probabilities(typed: str, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the probabilities of what was typed: `h`, `r`, `p`, `80 20`, `60 30 10`, or nothing.

    Raises:
        ValueError: saying what is wrong.
    """
    words = typed.replace(",", " ").replace("%", " ").split()
    if not words:
        return dict(rates)
    if len(words) == 1 and words[0].lower() in LETTERS:
        return {LETTERS[words[0].lower()]: 1.0}
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise ValueError("type percentages, as in 70 20 10, or h, r or p") from None
    if len(numbers) not in (2, 3) or abs(sum(numbers) - 100) > 100 * CLOSE:
        raise ValueError(f"type two or three percentages that add up to 100, not {sum(numbers):g}")
    return {name: value / 100 for name, value in zip(OUTCOMES, numbers, strict=False)}


def interval(typed: str) -> tuple[float, float] | None:
    """Return the interval that was typed, as in `1e-3 0.1`; None for nothing.

    Raises:
        ValueError: saying what is wrong.
    """
    words = typed.replace(",", " ").replace("..", " ").split()
    if not words:
        return None
    try:
        low, high = (float(word) for word in words)
    except ValueError:
        raise ValueError("type the smallest and the largest, as in 1e-3 0.1") from None
    if low < 0 or high < 0:
        raise ValueError("effects are sizes: 0 or more")
    return min(low, high), max(low, high)
