"""How the damage spreads: which tensors differ after which update, and on which ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.watch.divergence import Divergence, Look, differences, rank_local
from harness.watch.layout import EVALUATION, GRADIENTS, PARAMETERS, START, index_of
from harness.watch.schedule import part_at

STEPS = 12
"""Updates that are shown from the first difference on."""
BEFORE = 2
"""Updates that are shown ahead of it."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Tensors by updates, around the first difference."""

    steps: tuple[int, ...]
    """Updates, counted from 0."""
    tensors: dict[str, tuple[str, ...]]
    """Name -> for each update, what of it differed: '' nothing, 'g' its gradient before the
    update, 'p' the parameter after it, 'gp' both, '?' that it is not known."""
    ranks: dict[int, tuple[str, ...]]
    """Rank -> for each update: '' as the majority, 'odd' outside of it, '?' not known."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "steps": list(self.steps),
            "tensors": {name: list(marks) for name, marks in self.tensors.items()},
            "ranks": {str(rank): list(marks) for rank, marks in self.ranks.items()},
        }


def spread(look: Look, found: Divergence, last: int) -> Damage | None:
    """Return how a divergence of an optimizer spread, as far as it is still known.

    Args:
        look: what the ranks wrote about the optimizer.
        found: the first difference.
        last: number of the last update that any rank made.
    """
    if found.phase == EVALUATION:
        return None
    local = rank_local(look)
    first = max(0, found.step - BEFORE)
    steps = range(first, min(last, found.step + STEPS - BEFORE) + 1)
    names: list[str] = []
    marks: dict[tuple[str, int], str] = {}
    sides: dict[tuple[int, int], str] = {}
    ranks = found.ranks
    for step in steps:
        seen = {g: look(index_of(step, g)) for g in (GRADIENTS, PARAMETERS)}
        known = seen[PARAMETERS]
        names += [
            entry.name
            for entries, _ in known.values()
            for entry in entries
            if entry.name not in local and entry.name not in names
        ]
        complete = set(ranks) <= set(known)
        for phase, letter in ((GRADIENTS, "g"), (PARAMETERS, "p")):
            for difference in differences(seen[phase]):
                if difference.kind not in ("gradient", "parameter"):
                    continue
                if difference.name in local:
                    continue
                place = (difference.name, step)
                marks[place] = marks.get(place, "") + letter
                for rank in difference.odd or sum(difference.groups, ()):
                    sides[rank, step] = "odd"
        for rank in ranks:
            if not complete:
                sides.setdefault((rank, step), "" if rank in known else "?")
        if part_at(step) is not None:
            # What differed before may differ still, in a part that was not read.
            marks.update(
                {
                    (entry.name, step): "?"
                    for entries, _ in known.values()
                    for entry in entries
                    if entry.parts and (entry.name, step) not in marks
                    if any("p" in marks.get((entry.name, one), "") for one in steps)
                }
            )
        if not complete:
            marks.update({(name, step): "?" for name in names if (name, step) not in marks})
    if found.phase == START:
        for one in found.differences:
            marks.setdefault((one.name, 0), "p")
    if not names:
        return None
    return Damage(
        steps=tuple(steps),
        tensors={name: tuple(marks.get((name, step), "") for step in steps) for name in names},
        ranks={rank: tuple(sides.get((rank, step), "") for step in steps) for rank in ranks},
    )


_MARKS = {"": "·", "g": "g", "p": "P", "gp": "#", "?": " "}
LEGEND = "· equal   g gradient differs   P parameter differs   # both"
ROWS = 24


def tree(damage: Damage) -> list[str]:
    """Return the tensors as a tree of modules, with a column for each update.

    Modules without damage are one line; where there is more than fits, the undamaged go first.
    """
    hurt = [name for name, marks in damage.tensors.items() if set("".join(marks)) & set("gp")]
    sound = [name for name in damage.tensors if name not in hurt]
    shown = hurt[:ROWS] + sound[: max(0, ROWS - len(hurt))]
    ordered = [name for name in damage.tensors if name in shown]
    rows: list[tuple[str, tuple[str, ...] | None]] = []
    path: list[str] = []
    for name in ordered:
        *parents, leaf = name.split(".")
        common = 0
        while common < min(len(parents), len(path)) and parents[common] == path[common]:
            common += 1
        rows += [("  " * depth + parents[depth], None) for depth in range(common, len(parents))]
        path = parents
        rows.append(("  " * len(parents) + leaf, damage.tensors[name]))
    width = max(len(label) for label, _ in rows)
    column = max(3, len(str(damage.steps[-1])) + 1)
    head = " " * width + "".join(f"{step:>{column}}" for step in damage.steps)
    lines = [f"{head}  update"]
    for label, marks in rows:
        cells = "" if marks is None else "".join(f"{_MARKS[mark]:>{column}}" for mark in marks)
        lines.append(f"{label:<{width}}{cells}".rstrip())
    hidden = len(damage.tensors) - len(ordered)
    return [*lines, f"... and {hidden} more" if hidden else LEGEND]
