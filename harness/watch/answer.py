"""The answer: one line that says which step, rank and tensor, then the evidence below it."""

from __future__ import annotations

from collections.abc import Sequence

from harness.watch.divergence import Difference, Divergence
from harness.watch.layout import EVALUATION, GRADIENTS, START

_SHOWN = 12


def headline(found: Divergence) -> str:
    """Return the first line."""
    first = found.differences[0]
    where = {
        START: "before the first step",
        EVALUATION: f"evaluation after {found.step} updates",
    }.get(found.phase, f"step {found.step}")
    more = len(found.differences) - 1
    others = f" and {more} more of {found.compared}" if more else f", 1 of {found.compared}"
    return f"{where}: {who(first)} in {what(first)}{others}; cause not known"


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


def ranks(members: Sequence[int]) -> str:
    """Name ranks: `rank 1`, `ranks 0 and 2`."""
    if len(members) == 1:
        return f"rank {members[0]}"
    return f"ranks {', '.join(map(str, members[:-1]))} and {members[-1]}"


def what(difference: Difference) -> str:
    """Name the thing that differs."""
    if difference.kind == "setting":
        return f"optimizer setting {difference.name}"
    if difference.kind.startswith("state "):
        return f"optimizer state {difference.kind.removeprefix('state ')} of {difference.name}"
    return f"{difference.kind} {difference.name}"


def evidence(found: Divergence, *, source: str) -> list[str]:
    """Return the table below the first line: a row for each thing that differs."""
    step = found.step
    when = {
        START: "before the first update",
        EVALUATION: f"at the first forward pass of an evaluation, after {step} updates",
        GRADIENTS: f"before update {step}, in what it is made from",
    }.get(found.phase, f"after update {step}; its gradients and settings were equal")
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
