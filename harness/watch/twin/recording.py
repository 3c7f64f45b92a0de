"""Reads what a recorded run has written. Pure, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PHASES = ("gradients", "parameters")
Place = tuple[int, int, str]
"""Update, optimizer and phase, which sort in order of execution."""


class RecordingError(Exception):
    """A folder holds no recorded run; the message says what to type."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recorded run."""

    folder: Path
    world_size: int
    torch: str
    values: Mapping[Place, Mapping[str, tuple[float, ...]]]
    """Place -> tensor -> sum of squares, then the projections."""

    def updates(self, optimizer: int = 0) -> int:
        """Return how many updates of an optimizer were recorded."""
        return 1 + max((u for u, o, _ in self.values if o == optimizer), default=-1)


def read(folder: Path) -> Recording:
    """Return the run that was recorded into a folder.

    Raises:
        RecordingError: there is none, or not all of its ranks are there.
    """
    files = sorted(folder.glob("rank*.projections.jsonl"))
    if not files:
        raise RecordingError(
            f"{folder} holds no recorded run; record one: "
            f"torchrun --nproc-per-node=N -m harness.watch --record {folder} train.py"
        )
    values: dict[Place, dict[str, tuple[float, ...]]] = {}
    heads = []
    for file in files:
        head, *lines = _lines(file)
        heads.append(head)
        for line in lines:
            place = (line["update"], line["optimizer"], line["phase"])
            into = values.setdefault(place, {})
            for name, numbers in line["values"].items():
                known = into.get(name)
                into[name] = (
                    tuple(numbers)
                    if known is None
                    else tuple(a + b for a, b in zip(known, numbers, strict=True))
                )
    if not heads[0] or len(files) != heads[0]["world_size"]:
        raise RecordingError(
            f"{folder} holds {len(files)} ranks of {heads[0].get('world_size', '?')}; record again "
            "into an empty folder"
        )
    ordered = dict(sorted(values.items(), key=lambda item: item[0]))
    return Recording(
        folder=folder,
        world_size=heads[0]["world_size"],
        torch=heads[0]["torch"],
        values=ordered,
    )


def _lines(file: Path) -> list[dict]:  # type: ignore[type-arg]
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            # The last line of a rank that was killed.
            break
    return found or [{}]
