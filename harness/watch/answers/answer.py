"""The answer: one line that says which step, rank, tensor, cause and change; evidence below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.causes import Cause, Diagnosis, Strength, catalogue
from harness.plural import number_of
from harness.watch.answers.damage import Damage, tree
from harness.watch.answers.per_rank import RankTable
from harness.watch.divergence import Difference, Divergence, to_json
from harness.watch.layout import EVALUATION, GRADIENTS, START
from harness.watch.naming import ranks

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the run's watchers have found together."""

    exit_code: int
    first: str
    """The headline where nothing was found; what was found has one of its own."""
    divergence: Divergence | None = None
    source: str = ""
    diagnoses: tuple[Diagnosis, ...] = ()
    notes: tuple[str, ...] = ()
    kept: str | None = None
    """Folder of what was kept."""
    table: RankTable | None = None
    """What each rank did around the first bad update."""
    damage: Damage | None = None
    """How the damage spread from there."""
    calls: RankTable | None = None
    """The last collectives of each rank, where the run hung or a rank was gone."""

    @property
    def headline(self) -> str:
        """The first line."""
        found = self.divergence
        best = next(iter(self.diagnoses), None)
        if found is not None:
            known = best if best is not None and best.explains else None
            return f"{headline(found)}; {_conclusion(known)}"
        if best is not None and best.strength > Strength.FACT:
            when = "" if best.step is None else f"step {best.step}: "
            who_ = f"{ranks(best.ranks)}: " if best.ranks else ""
            return f"{when}{who_}{best.because[0]}; {_conclusion(best)}"
        return self.first

    def lines(self) -> list[str]:
        """Return the answer as it is printed."""
        lines = [self.headline]
        if self.divergence is not None:
            lines += evidence(self.divergence, source=self.source)
        for diagnosis in self.diagnoses:
            lines += _diagnosis(diagnosis)
        if self.table is not None:
            lines += _titled("ranks", self.table.lines())
        if self.damage is not None:
            lines += _titled("damage", tree(self.damage))
        if self.calls is not None:
            lines += _titled("calls", self.calls.lines())
        lines += [f"  note     {note}" for note in self.notes]
        if self.kept is not None:
            lines.append(f"  kept     {self.kept}/watch.html")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "exit_code": self.exit_code,
            "headline": self.headline,
            "divergence": None if self.divergence is None else to_json(self.divergence),
            "source": self.source,
            "diagnoses": [
                vars(one) | {"strength": one.strength.name.lower(), "change": _cause(one).change}
                for one in self.diagnoses
            ],
            "notes": list(self.notes),
            "kept": self.kept,
            "ranks": None if self.table is None else self.table.to_json(),
            "damage": None if self.damage is None else self.damage.to_json(),
        }


def _titled(title: str, lines: list[str]) -> list[str]:
    return [f"  {title if i == 0 else '':<8} {line}".rstrip() for i, line in enumerate(lines)]


def headline(found: Divergence) -> str:
    """Return what differs, where and when, in a line."""
    first = found.differences[0]
    span = f"{found.step}" if found.since is None else f"{found.since} to {found.step}"
    where = {
        START: "before the first step",
        EVALUATION: f"evaluation after {number_of(found.step, 'update')}",
    }.get(found.phase, f"step {span}")
    more = len(found.differences) - 1
    others = f" and {more} more of {found.compared}" if more else f", 1 of {found.compared}"
    return f"{where}: {who(first)} in {what(first)}{others}"


def _conclusion(known: Diagnosis | None) -> str:
    if known is None or known.strength == Strength.FACT:
        return "cause not known"
    sure = "cause" if known.strength == Strength.PROVEN else "likely cause"
    where = "" if known.where is None else f" at {known.where}"
    return f"{sure}: {known.cause}{where}; fix: {_cause(known).change}"


def _cause(diagnosis: Diagnosis) -> Cause:
    return catalogue()[diagnosis.cause]


_TITLES = {Strength.PROVEN: "cause", Strength.LIKELY: "likely", Strength.FACT: "fact"}


def _diagnosis(diagnosis: Diagnosis) -> list[str]:
    where = "" if diagnosis.where is None else f", {diagnosis.where}"
    who_ = f", {ranks(diagnosis.ranks)}" if diagnosis.ranks else ""
    lines = [f"  {_TITLES[diagnosis.strength]:<8} {diagnosis.cause}{who_}{where}"]
    lines += [f"           {sentence}" for sentence in diagnosis.because]
    if diagnosis.strength == Strength.LIKELY:
        lines.append(f"           to be sure: {_cause(diagnosis).confirm}")
    if diagnosis.strength > Strength.FACT:
        lines += [f"           | {line}" for line in _cause(diagnosis).fix.splitlines()]
        lines.append(f"           more: python -m harness.watch explain {diagnosis.cause}")
    return lines


def who(difference: Difference) -> str:
    """Say which ranks are on which side."""
    if difference.odd:
        verb = "differs from the others" if len(difference.odd) == 1 else "differ from the others"
        return f"{ranks(difference.odd)} {verb}"
    if len(difference.groups) == 2 and sum(map(len, difference.groups)) == 2:
        return f"{ranks(sorted(sum(difference.groups, ())))} differ"
    if all(len(group) == 1 for group in difference.groups):
        return "all ranks differ from each other"
    sides = ", ".join(ranks(group) for group in difference.groups)
    return f"no majority: {sides} differ"


def what(difference: Difference) -> str:
    """Name the thing that differs."""
    if difference.kind == "setting":
        return f"optimizer setting {difference.name}"
    if difference.kind.startswith("state "):
        return f"optimizer state {difference.kind.removeprefix('state ')} of {difference.name}"
    return f"{difference.kind} {difference.name}"


def _equal_until_then(found: Divergence) -> str:
    if found.sampled:
        return "settings were equal, and its gradients where they were sampled"
    return "gradients and settings were equal"


def evidence(found: Divergence, *, source: str) -> list[str]:
    """Return the table below the first line: a row for each thing that differs."""
    step = found.step
    after = number_of(step, "update")
    when = {
        START: "before the first update",
        EVALUATION: f"at the first forward pass of an evaluation, after {after}",
        GRADIENTS: f"before update {step}, in what it is made from",
    }.get(found.phase, f"after update {step}; its {_equal_until_then(found)}")
    if found.since is not None:
        span = f"made by one of {found.since} to {step}"
        when += f" (it is read in parts, one at an update: {span}; --whole would tell which)"
    lines = [
        f"  where    {when}, of {source}; steps count from 0",
        f"  compared {found.compared} of this kind on {ranks(found.ranks)}",
    ]
    width = max(len(what(d)) for d in found.differences[:_SHOWN])
    lines.append("  differs  " + " " * width + "   ranks that agree with each other")
    for difference in found.differences[:_SHOWN]:
        sides = " | ".join(", ".join(map(str, group)) for group in difference.groups)
        values = "; ".join(f"rank {rank}: {v}" for rank, v in difference.values.items())
        lines.append(f"           {what(difference):<{width}}   {sides}   {values}".rstrip())
    hidden = len(found.differences) - _SHOWN
    if hidden > 0:
        lines.append(f"           ... and {hidden} more")
    return lines
