"""What each rank did around the first bad update, side by side. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.watch.evidence import Evidence
from harness.watch.journal import Event

AROUND = 1
"""Updates before and after the bad one."""
MOST_RANKS = 16
_COLUMNS = (
    # title, what stands in it
    ("loss", "losses"),
    ("rows", "rows"),
    ("forwards", "forwards"),
    ("no sync", "forwards_without_sync"),
    ("past DDP", "forwards_past_wrapper"),
    ("backwards", "backwards"),
)


@dataclass(frozen=True, kw_only=True)
class RankTable:
    """Rows of text under column titles."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"titles": list(self.titles), "rows": [list(row) for row in self.rows]}

    def lines(self) -> list[str]:
        """Return it as text, numbers to the right."""
        table = [self.titles, *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.titles))]
        return [
            "   ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            for row in table
        ]


def per_rank(evidence: Evidence, *, optimizer: int, update: int) -> RankTable | None:
    """Return the table for an update of an optimizer, or None if nothing was written of it."""
    ranks = evidence.ranks[:MOST_RANKS]
    windows: list[tuple[int, int, Event]] = []
    for at in range(max(0, update - AROUND), update + AROUND + 1):
        for rank in ranks:
            window = evidence.update(rank, optimizer, at)
            if window is not None and window["update"] <= at:
                windows.append((at, rank, window if window["update"] == at else _counts(window)))
    if not windows:
        return None
    columns = [(t, key) for t, key in _COLUMNS if any(key in w for _, _, w in windows)]
    rows = []
    for at, rank, window in windows:
        mark = "->" if at == update else ""
        cells = (_cell(window.get(key)) for _, key in columns)
        rows.append((mark, str(at), str(rank), *cells))
    return RankTable(titles=("", "update", "rank", *(t for t, _ in columns)), rows=tuple(rows))


def _counts(window: Event) -> Event:
    """Return what also holds for a later window that was not written: counts, not values."""
    return {key: value for key, value in window.items() if not isinstance(value, list)}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = [f"{one:.6g}" if isinstance(one, float) else str(one) for one in value[:4]]
        return " ".join(shown) + (" ..." if len(value) > 4 else "")
    return str(value)
