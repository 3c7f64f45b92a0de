"""What has been predicted here so far: one JSON line a session, which nobody has to keep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import RecordError
from launch.predict.dimensions import Dimension
from launch.predict.score import dimension_score

FOLDER = "predict"
NAME = "history.jsonl"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question that was answered and decided, or that the run left open."""

    dimension: str
    key: str
    """The question: scenario and claim, or statement."""
    outcome: str
    probabilities: dict[str, float]
    skill: float | None
    """Of verdict, number and arms together; None if the run left the question open."""
    verdict_skill: float | None = None
    number_skill: float | None = None
    effect: float | None = None
    interval: Sequence[float] | None = None
    arms_skill: float | None = None
    differ: Sequence[str] | None = None
    """Arms that were said to end with other weights than the reference."""


@dataclass(frozen=True, kw_only=True)
class Sitting:
    """One session of one player."""

    date: str
    player: str
    draw: int
    items: Sequence[Item]

    def skills(self, dimension: Dimension) -> list[float]:
        """Return the skills of the items of a dimension that were decided."""
        return [
            item.skill
            for item in self.items
            if item.dimension == dimension.value and item.skill is not None
        ]


def append(folder: Path, sitting: Sitting) -> None:
    """Add a session.

    Raises:
        RecordError: if the file cannot be written.
    """
    try:
        with (folder / NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(sitting)) + "\n")
    except OSError as error:
        raise RecordError(f"cannot write {folder / NAME}: {error.strerror}") from error


def read(folder: Path, player: str) -> list[Sitting]:
    """Return the sessions of a player, the oldest first; a line that is damaged is left out."""
    try:
        lines = (folder / NAME).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            data: dict[str, Any] = json.loads(line)
            items = tuple(Item(**item) for item in data.pop("items"))
            sitting = Sitting(items=items, **data)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if sitting.player == player:
            found.append(sitting)
    return found


def progress(sittings: Sequence[Sitting], dimension: Dimension) -> list[float]:
    """Return the score after each session, over all items up to it."""
    scores = []
    skills: list[float] = []
    for sitting in sittings:
        skills += sitting.skills(dimension)
        scores.append(dimension_score(skills))
    return scores
