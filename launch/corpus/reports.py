"""The page and the JUnit file of a corpus, from its record and the verdicts of its runs."""

from __future__ import annotations

import dataclasses
from html import escape
from pathlib import Path

import scenarios
from harness.errors import HarnessError
from harness.plan import Layout, write_text
from harness.report import corpus as page_
from harness.report import junit as junit_
from harness.report.wording import printable
from launch.corpus.record import Corpus, Entry, Paths, verdict_of


def page(record: Corpus, folder: Path) -> page_.Page:
    """Return what the page is made from."""
    titles: dict[str, dict[str, str]] = {}
    for name in {entry.scenario for entry in record.entries}:
        try:
            titles[name] = {claim.name: claim.text for claim in scenarios.load(name).claims}
        except HarnessError:
            titles[name] = {}
    reports = {
        entry.key: report
        for entry in record.entries
        if entry.run and (folder / (report := f"{entry.run}/report.html")).exists()
    }
    return page_.Page(
        id=record.id,
        environment=record.environment,
        seconds=record.seconds,
        entries=[
            dataclasses.asdict(entry) | {"report": reports.get(entry.key)}
            for entry in record.entries
        ],
        claims=titles,
    )


def junit(record: Corpus, paths: Paths) -> None:
    """Write `junit.xml`: one suite a case, one test a claim.

    Raises:
        HarnessError: if it cannot be written, or a verdict cannot be read.
    """
    suites = "\n".join(_suite(entry, paths.folder) for entry in record.entries)
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>{suites}\n</testsuites>\n'
    write_text(paths.junit, text)


def _suite(entry: Entry, folder: Path) -> str:
    name = f"{entry.scenario}[gpus={entry.gpus}]"
    if entry.run and entry.findings:
        verdict = verdict_of(Layout(folder / entry.run))
        scenario = scenarios.load(entry.scenario)
        return junit_.suite(scenario, dataclasses.replace(verdict, scenario=name))
    skipped = entry.state in ("skipped", "not_run")
    said = escape(printable(entry.problem or entry.state.replace("_", " ")))
    said = said.replace("\n", "&#10;")
    tag = "skipped" if skipped else "error"
    return (
        f'<testsuite name="{escape(name)}" tests="1" failures="0" errors="{int(not skipped)}" '
        f'skipped="{int(skipped)}"><testcase classname="{escape(name)}" name="run">'
        f'<{tag} message="{said}"/></testcase></testsuite>'
    )
