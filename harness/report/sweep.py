"""The page of a sweep: findings by point, curves over the swept keys, heat maps, failed points.

One file that opens offline, holds no script, and links to the report of every point.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness.floor import CLEAN, FAULT
from harness.plan import write_text
from harness.plural import number_of
from harness.report import heat, sweep_figures
from harness.report.markup import cut, section, table, text
from harness.report.wording import DASH, number

LIMIT = 1_000_000
"""Bytes a page may have."""
_ASSETS = Path(__file__).parent / "assets"
_SIGNS = {"holds": "✓", "refuted": "✕", "unknown": "?"}
_BROKEN = ("failed", "refused", "interrupted", "not run")


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page is made from: rows of the sweep's tables."""

    name: str
    title: str
    claims: Mapping[str, str]
    """Claim name -> the claim in one sentence."""
    swept: Sequence[str]
    points: Sequence[Mapping[str, Any]]
    """point, state, problem, run, report, reused, seconds and the swept keys of every point."""
    arms: Sequence[Mapping[str, Any]]
    findings: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _Detail:
    panels: int
    """Panels a figure has at most."""
    reasons: bool
    """True to give, with each finding, its reason and the link to its point's report."""
    points: int = 1_000_000
    """Points listed at most."""


_DETAILS = (
    _Detail(panels=64, reasons=True),
    _Detail(panels=24, reasons=True),
    _Detail(panels=24, reasons=False),
    _Detail(panels=8, reasons=False),
    _Detail(panels=8, reasons=False, points=500),
    _Detail(panels=0, reasons=False, points=500),
)
"""How much is shown; the next one is taken where the page would be too large."""
_MANY = 4_000
"""With so many findings their reasons cannot fit: that need not be tried."""


def write(path: Path, page: Page) -> None:
    """Write the page.

    Raises:
        RecordError: if the file cannot be written.
    """
    write_text(path, render(page, path.parent))


def render(page: Page, folder: Path) -> str:
    """Return the page, with links that start in `folder`, within the limit if it can be done."""
    for detail in _DETAILS[2 if len(page.findings) > _MANY else 0 :]:
        result = _assemble(page, folder, detail)
        if len(result.encode()) < LIMIT:
            break
    return result


def _assemble(page: Page, folder: Path, detail: _Detail) -> str:
    links = {point["point"]: _link(point, folder) for point in page.points}
    body = "\n".join(
        [
            _head(page),
            _problems(page),
            _matrix(page, links, detail),
            _figures(page, detail),
            _points(page, links, detail),
            _again(page),
        ]
    )
    style = "\n".join(
        (_ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "sweep.css")
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(f'sweep of {page.name}: {_tally(page)}')}</title>\n"
        f"<style>\n{style}\n</style>\n</head>\n<body>\n{heat.HATCH}{body}\n</body>\n</html>\n"
    )


def _link(point: Mapping[str, Any], folder: Path) -> str:
    report = point.get("report")
    if not report or not Path(report).exists():
        return ""
    return quote(Path(os.path.relpath(report, folder)).as_posix())


def _tally(page: Page) -> str:
    states = [point["state"] for point in page.points]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    return ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in counts.items())


def _head(page: Page) -> str:
    count = len(page.points)
    over = ", ".join(map(sweep_figures.short, page.swept)) or "no key"
    return (
        '<header><p class="crumb"><b>crossrank</b> sweep / '
        f"<code>{text(page.name)}</code></p>"
        f"<h1>{number_of(count, 'point')} over {text(over)}: "
        f"{text(_tally(page))}</h1>"
        f'<p class="title">{text(page.title)}</p>'
        '<nav aria-label="On this page"><a href="#findings">Findings</a>'
        '<a href="#curves">Curves</a><a href="#heat">Heat maps</a>'
        '<a href="#points">Points</a><a href="table.csv">table.csv</a>'
        '<a href="findings.csv">findings.csv</a></nav></header>'
    )


def _problems(page: Page) -> str:
    broken = [point for point in page.points if point["state"] in _BROKEN]
    if not broken:
        return ""
    items = "".join(
        f"<li><b>{text(_name(page, point))}</b>: {text(point['state'])}"
        f"{text(': ' + cut(point['problem'], 1000)) if point['problem'] else ''}</li>"
        for point in broken[:20]
    )
    if len(broken) > 20:
        items += f"<li>and {len(broken) - 20} more, in the table of points</li>"
    title = f"{len(broken)} of {len(page.points)} points have no sound run"
    return f'<div class="failures">{section("failures", title, f"<ul>{items}</ul>")}</div>'


def _name(page: Page, point: Mapping[str, Any]) -> str:
    values = [f"{key}={point[key]}" for key in page.swept]
    return " ".join(values) or f"point {point['point']}"


def _matrix(page: Page, links: Mapping[int, str], detail: _Detail) -> str:
    """Return claims down, points across."""
    claims = list(dict.fromkeys(row["claim"] for row in page.findings))
    if not claims:
        return section("findings", "Findings", "<p>No point came to a finding.</p>")
    by = {(row["claim"], row["point"]): row for row in page.findings}
    rows = "".join(_claim(claim, page, by, links, detail) for claim in claims)
    legend = (
        '<ul class="legend">'
        + "".join(
            f'<li><span class="key {outcome}">{sign}</span>{outcome}</li>'
            for outcome, sign in _SIGNS.items()
        )
        + '<li><span class="key off">✓</span>not what this project found</li>'
        f"<li>{DASH} not judged</li></ul>"
    )
    body = (
        '<p class="lead">Each claim at each point; a cell leads to the report of its point.</p>'
        f'{legend}<div class="scroll" tabindex="0"><table class="matrix">'
        f"<thead>{_columns(page, detail)}</thead><tbody>{rows}</tbody></table></div>"
        f"{_cropped(page, detail)}"
    )
    return section("findings", "Findings", body)


def _cropped(page: Page, detail: _Detail) -> str:
    if len(page.points) <= detail.points:
        return ""
    told = f"The first {detail.points} of {len(page.points)} points; the tables have all of them."
    return f'<p class="note">{told}</p>'


def _columns(page: Page, detail: _Detail) -> str:
    """Return a header row for each swept key, equal neighbours under one heading."""
    rows = []
    for depth, key in enumerate(page.swept):
        prefix = page.swept[: depth + 1]
        runs = groupby(
            page.points[: detail.points], key=lambda point: [point[name] for name in prefix]
        )
        cells = "".join(
            f'<th scope="col" colspan="{len(list(points))}">'
            f"{text(sweep_figures.words(key, values[-1]))}</th>"
            for values, points in runs
        )
        rows.append(f'<tr><th scope="row">{text(key)}</th>{cells}</tr>')
    if not rows:
        cells = "".join(
            f'<th scope="col">{point["point"]}</th>' for point in page.points[: detail.points]
        )
        rows.append(f'<tr><th scope="row">point</th>{cells}</tr>')
    return "".join(rows)


def _claim(
    claim: str,
    page: Page,
    by: Mapping[tuple[str, int], Mapping[str, Any]],
    links: Mapping[int, str],
    detail: _Detail,
) -> str:
    cells = []
    count: dict[str, int] = {}
    for point in page.points:
        if point["point"] > detail.points:
            break
        row = by.get((claim, point["point"]))
        if row is None:
            why = text(point["state"].replace("_", " "))
            cells.append(f'<td><span class="absent" title="{why}">{DASH}</span></td>')
            continue
        outcome = row["outcome"]
        count[outcome] = count.get(outcome, 0) + 1
        off = ' class="off"' if outcome not in (row["expects"], "unknown") else ""
        if not detail.reasons:
            cells.append(f'<td{off}><a class="{outcome}">{_SIGNS[outcome]}</a></td>')
            continue
        why = f"{_name(page, point)}: {outcome}: {row['reason']}"
        link = links[point["point"]]
        target = f' href="{link}"' if link else ""
        cells.append(
            f'<td{off}><a class="{outcome}"{target} title="{text(why)}" '
            f'aria-label="{outcome}">{_SIGNS[outcome]}</a></td>'
        )
    told = ", ".join(f"{outcome} in {found}" for outcome, found in count.items())
    said = text(page.claims.get(claim, ""))
    return (
        f'<tr><th scope="row"><b>{text(claim)}</b><small class="sentence">{said}</small>'
        f"<small>{told}</small></th>{''.join(cells)}</tr>"
    )


def _figures(page: Page, detail: _Detail) -> str:
    measured = sweep_figures.losses(page.swept, page.arms, detail.panels)
    judged = sweep_figures.claims(page.swept, page.findings, detail.panels)
    maps = sweep_figures.heats(page.swept, page.points, page.arms, detail.panels)
    lead = (
        '<p class="lead">The gap across ranks is the largest minus the smallest loss of the ranks '
        "of an arm. Each rank sees other rows, so it is not zero in a sound run. The distance "
        "from the reference is that of the mean over ranks, which rounding alone cannot move by "
        f"more than {CLEAN:g} floors; {FAULT:g} or more are a fault. An arm is compared with the "
        "reference that has its dtype and options, and with none where no single one does.</p>"
    )
    curves = lead + (_folded([*measured, *judged]) or _nothing(page))
    heated = _folded(maps) or ("<p>A heat map needs two swept keys and a recorded loss.</p>")
    return (
        section("curves", "Curves", curves + _left_out([*measured, *judged]))
        + "\n"
        + section("heat", "Heat maps", heated + _left_out(maps))
    )


def _folded(figures: Sequence[sweep_figures.Figure]) -> str:
    """Return the figures; one that shows the same as another over other keys is folded."""
    shown: set[str] = set()
    parts = []
    for figure in figures:
        what = figure.title.rpartition(", ")[0]
        if what in shown:
            summary = f"<summary>{text(figure.title)}</summary>"
            parts.append(f'<details class="more">{summary}{figure.html}</details>')
        else:
            parts.append(figure.html)
        shown.add(what)
    return "".join(parts)


def _nothing(page: Page) -> str:
    numeric = sweep_figures.axes(page.swept, page.points) if page.points else []
    if not numeric:
        return "<p>No numeric key was swept.</p>"
    return "<p>No arm recorded a loss that can be compared, and no claim has an effect.</p>"


def _left_out(figures: Sequence[sweep_figures.Figure]) -> str:
    count = sum(figure.left_out for figure in figures)
    if not count:
        return ""
    return (
        f'<p class="note">{count} more panels did not fit on this page; the tables have them.</p>'
    )


def _points(page: Page, links: Mapping[int, str], detail: _Detail) -> str:
    agree: dict[int, list[bool]] = {}
    for row in page.findings:
        agree.setdefault(row["point"], []).append(row["outcome"] == row["expects"])
    rows = []
    for point in page.points[: detail.points]:
        found = agree.get(point["point"], [])
        run, link = point["run"] or "", links[point["point"]]
        named = f'<a href="{link}">{text(run)}</a>' if link else text(run or DASH)
        took = "as it was" if point["reused"] else _seconds(point["seconds"])
        state = point["state"]
        rows.append(
            [
                f'<th scope="row">{point["point"]}</th>',
                *(f'<td class="num">{text(point[key])}</td>' for key in page.swept),
                f'<span class="state {state.replace(" ", "_")}">{state.replace("_", " ")}</span>',
                f'<td class="num">{sum(found)} of {len(found)}</td>' if found else DASH,
                f'<td class="num">{took}</td>',
                named,
                f'<td class="problem">{text(cut(point["problem"] or "", 300))}</td>',
            ]
        )
    head = ["Point", *page.swept, "Result", "As expected", "Took", "Report", "What went wrong"]
    return section("points", "Points", table(head, rows) + _cropped(page, detail))


def _seconds(value: float | None) -> str:
    return DASH if value is None else f"{number(value, 2)} s"


def _again(page: Page) -> str:
    return (
        '<p class="note">Everything here is in <a href="table.csv">table.csv</a> and '
        '<a href="findings.csv">findings.csv</a>, and as Parquet beside them: one row per point '
        "and arm, one per point and claim. The same command runs what is missing or failed.</p>"
    )
