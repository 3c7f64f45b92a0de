"""What a session has come to, in the terminal: each answer, the radar chart, and the progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.report.terminal import number
from launch.predict import history, radar, score
from launch.predict.dimensions import Dimension
from launch.predict.history import Sitting
from launch.predict.questions import Question
from launch.predict.session import RADAR, Found

STYLES = {"holds": "bold green", "refuted": "bold magenta", "partly": "bold cyan"}
LOOKS = {
    score.ABOVE: "bold green",
    score.BELOW: "bold red",
    score.OPEN: "yellow",
    score.FEW: "dim",
}
BLOCKS = "▁▂▃▄▅▆▇█"
LAST = 20
"""Sessions shown of the progress."""


def scores(sittings: Sequence[Sitting]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the score of each dimension over all sessions, and where it stands."""
    found: dict[str, float] = {}
    stands: dict[str, str] = {}
    for dimension in Dimension:
        skills = [skill for sitting in sittings for skill in sitting.skills(dimension)]
        found[dimension.value] = score.dimension_score(skills)
        stands[dimension.value] = score.standing(skills)
    return found, stands


def show(
    out: Console,
    questions: Sequence[Question],
    sitting: Sitting,
    found: Sequence[Found],
    everything: Sequence[Sitting],
    where: Path,
) -> None:
    """Print answers beside findings, then the scores so far."""
    for place, (question, item, result) in enumerate(
        zip(questions, sitting.items, found, strict=True), 1
    ):
        topic = question.topic
        out.print()
        out.print(Text.assemble((f"{place}. ", "dim"), (topic.text, "bold")), soft_wrap=True)
        said = ", ".join(
            f"{name} {100 * share:.0f} %" for name, share in item.probabilities.items() if share
        )
        style = STYLES.get(result.outcome, "yellow")
        skill = "costs nothing" if item.skill is None else f"skill {item.skill:+.2f}"
        out.print(Text.assemble("   ", (result.outcome, style), f"  you: {said}  ({skill})"))
        if result.effect is not None:
            low, high = item.interval or (None, None)
            yours = f"you: {number(low)} to {number(high)}" if item.interval else "you passed"
            out.print(Text(f"   effect {number(result.effect)}  {yours}"))
        if result.differ and item.differ is not None:
            apart = ", ".join(name for name, other in result.differ.items() if other) or "none"
            yours = ", ".join(item.differ) or "none"
            out.print(Text(f"   arms that differ: {apart}  you: {yours}"), soft_wrap=True)
        out.print(Text(f"   {result.reason}", style="dim"), soft_wrap=True)
        out.print(Text(f"   make show scenario={topic.scenario}", style="dim"))
    out.print()
    total, stands = scores(everything)
    for line in radar.terminal(total):
        out.print(Text(line), soft_wrap=True)
    out.print(_table(sitting, everything, total, stands))
    out.print(
        Text(
            f"5: no more than the base rates; below {score.LINE:g}: the warning line (dotted). "
            f"A dimension stands above or below it from {score.ENOUGH} answers on.",
            style="dim",
        )
    )
    out.print(Text(f"picture  {where / RADAR}", style="dim"), soft_wrap=True)
    out.print(Text(f"seals    make predict check={where}", style="dim"), soft_wrap=True)


def _table(
    sitting: Sitting,
    everything: Sequence[Sitting],
    total: dict[str, float],
    stands: dict[str, str],
) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (
        ("dimension", "left"),
        ("this time", "right"),
        ("so far", "right"),
        ("answers", "right"),
        ("", "left"),
        ("sessions", "left"),
    ):
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    for dimension in Dimension:
        name = dimension.value
        skills = sitting.skills(dimension)
        count = sum(len(one.skills(dimension)) for one in everything)
        low = "bold red" if stands[name] == score.BELOW else ""
        table.add_row(
            name,
            f"{score.raw_score(skills):.1f}" if skills else "-",
            Text(f"{total[name]:.1f}", style=low),
            str(count),
            Text(stands[name], style=LOOKS[stands[name]]),
            sparkline(history.progress(everything, dimension)[-LAST:]),
        )
    return table


def sparkline(values: Sequence[float]) -> str:
    """Return scores from 0 to 10 as a row of blocks."""
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, max(0, round(value / 10 * top)))] for value in values)
