"""Writes the self-contained page of a run: it opens offline and says everything without scripts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.plan import Layout, write_text
from harness.report import claims, sections
from harness.report.chart import Chart
from harness.report.curves import Detail, Drawn, draw_all
from harness.report.markup import text
from harness.report.series import charts, colours
from harness.scenario import Scenario
from harness.tables import Tables
from harness.verdict import Verdict

LIMIT = 1_000_000
"""Bytes a page may have: mail gateways and CI artefact viewers take that much."""
_ASSETS = Path(__file__).parent / "assets"
_DETAILS = (
    Detail(points=8_000, digits=17, numbers=True),
    Detail(points=40_000, digits=4, numbers=True),
    Detail(points=20_000, digits=5, numbers=True),
    Detail(points=20_000, digits=0, numbers=True),
    Detail(points=8_000, digits=0, numbers=False),
)
"""How much is drawn; the next one is taken where the page would be too large."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page is made from."""

    layout: Layout
    scenario: Scenario
    name: str
    tables: Tables
    verdict: Verdict
    environment: Mapping[str, Any]
    config_text: str


def write(
    layout: Layout,
    scenario: Scenario,
    name: str,
    tables: Tables,
    verdict: Verdict,
    environment: Mapping[str, Any],
    config_text: str,
) -> None:
    """Write `report.html`.

    Raises:
        RecordError: if the file cannot be written.
    """
    page = Page(
        layout=layout,
        scenario=scenario,
        name=name,
        tables=tables,
        verdict=verdict,
        environment=environment,
        config_text=config_text,
    )
    write_text(layout.report, render(page))


def render(page: Page) -> str:
    """Return the page; with fewer points, then fewer charts, where it would pass the limit."""
    found = charts(page.scenario, page.tables)
    values = sum(
        line.span.count for chart in found for panel in chart.panels for line in panel.lines
    )
    for detail in _DETAILS[values > _DETAILS[0].points :]:
        result = _assemble(page, found, detail)
        if len(result.encode()) < LIMIT:
            return result
    for keep in range(len(found) - 1, -1, -1):
        result = _assemble(page, found[:keep], _DETAILS[-1], left_out=len(found) - keep)
        if len(result.encode()) < LIMIT:
            return result
    return result


def _assemble(page: Page, found: Sequence[Chart], detail: Detail, left_out: int = 0) -> str:
    scenario, verdict, tables = page.scenario, page.verdict, page.tables
    looks = colours(scenario)
    drawn = draw_all(found, looks, detail, left_out=left_out)
    body = "\n".join(
        [
            sections.head(scenario, page.name, tables, verdict, page.environment),
            sections.failures(verdict),
            claims.claims(scenario, verdict),
            drawn.html,
            sections.arms(scenario, tables, looks),
            sections.branch(scenario),
            sections.again(page.layout, tables),
            sections.environment(page.environment, page.config_text),
        ]
    )
    title = f"{page.name}: {verdict.headline}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>\n{_asset('page.css')}\n</style>\n</head>\n"
        f"<body>\n{body}\n{_scripts(drawn)}</body>\n</html>\n"
    )


def _scripts(drawn: Drawn) -> str:
    if not drawn.data:
        return ""
    # "<" must not stand in a script element, where a text could otherwise close it.
    data = drawn.data.replace("<", "\\u003c")
    licence = _asset("uPlot.LICENSE.txt").strip()
    return (
        f"<style>{_asset('uPlot.min.css')}</style>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>/*\n{licence}\n*/\n{_asset('uPlot.iife.min.js')}</script>\n"
        f"<script>\n{_asset('page.js')}\n</script>\n"
    )


@functools.lru_cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
