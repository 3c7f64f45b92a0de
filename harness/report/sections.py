"""The sections of the page that are text and tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.plan import Layout
from harness.report.markup import cut, exact, ident, pre, section, table, text
from harness.report.source import sources
from harness.report.wording import CONCLUSIONS, DASH, arm_status, judged, tally
from harness.scenario import Arm, Scenario
from harness.tables import Tables
from harness.verdict import Verdict

LONG = 100
"""A headline of more characters is set smaller."""
WIDEST = 4
"""Up to so many options get a column each; more would hide how the ranks ended."""


def head(
    scenario: Scenario,
    name: str,
    tables: Tables,
    verdict: Verdict,
    environment: Mapping[str, Any],
) -> str:
    """Return title, headline, conclusion and where it ran."""
    short, long = CONCLUSIONS[verdict.conclusion]
    plan = tables.plan
    facts = [
        f"{plan.world_size} {'rank' if plan.world_size == 1 else 'ranks'}",
        f"{plan.device}, {plan.backend}",
        f"seed {plan.seed}",
        f"engine {plan.engine}",
        f"run {verdict.run_id}",
    ]
    links = [
        ("claims", "Claims"),
        ("curves", "Curves"),
        ("arms", "Arms"),
        ("branch", "Code"),
        ("again", "Judge again"),
        ("environment", "Environment"),
    ]
    size = ' class="long"' if len(verdict.headline) > LONG else ""
    nav = "".join(f'<a href="#{target}">{label}</a>' for target, label in links)
    return (
        f'<header><p class="crumb"><b>crossrank</b> {text(scenario.family)} / '
        f"<code>{text(name)}</code></p>"
        f'<h1{size}>{text(verdict.headline)}</h1><p class="title">{text(scenario.title)}</p>'
        f'<p class="conclusion"><span class="badge {verdict.conclusion.value}">{short}</span> '
        f"<span>{long} {text(_sentence(tally(judged(scenario, verdict))))}</span></p>"
        f'<p class="facts">{"".join(f"<span>{text(fact)}</span>" for fact in facts)}</p>'
        f'<nav aria-label="On this page">{nav}</nav></header>'
    )


def failures(verdict: Verdict) -> str:
    """Return what went wrong in the ranks and in the headline; empty in a sound run."""
    broken = verdict.judge_errors.get("headline")
    if not verdict.failures and not broken:
        return ""
    shown = verdict.failures[:40]
    items = "".join(f"<li>{text(cut(failure, 2000))}</li>" for failure in shown)
    if len(verdict.failures) > len(shown):
        items += f"<li>and {len(verdict.failures) - len(shown)} more, in verdict.json</li>"
    body = f"<ul>{items}</ul>" if items else ""
    if broken:
        body += f"<p>The headline could not be made:</p>{pre(broken)}"
    return f'<div class="failures">{section("failures", "What went wrong", body)}</div>'


def arms(scenario: Scenario, tables: Tables, colours: Mapping[str, int]) -> str:
    """Return the arms beside each other: role, what differs, options, how its ranks ended."""
    options = list(dict.fromkeys(name for arm in scenario.arms for name in arm.options))
    wide = len(options) <= WIDEST
    rows = []
    for arm in scenario.arms:
        status = "<br>".join(
            f'<span class="{"done" if sound else "bad"}">{text(cut(words, 400))}</span>'
            for words, sound in arm_status(tables, arm.name)
        )
        planned = next((plan for plan in tables.plan.arms if plan.name == arm.name), None)
        repeats = str(planned.repeats) if planned else DASH
        cells = [
            f'<th scope="row" id="{ident("arm", arm.name)}">'
            f'<span class="swatch c{colours[arm.name]}"></span>{text(arm.name)}</th>',
            f'<span class="role {arm.role.value}">{arm.role.value}</span>',
            f'<td class="about">{text(arm.about)}</td>',
            status,
            repeats,
            *(
                _options(arm, options)
                if wide
                else [f'<td class="options">{" ".join(_pairs(arm))}</td>']
            ),
        ]
        rows.append(cells)
    fixed = ["Arm", "Role", "What differs", "Ranks", "Repeats"]
    columns = [*fixed, *(options if wide else ["Options"])]
    return section("arms", "Arms side by side", table(columns, rows))


def _options(arm: Arm, names: Sequence[str]) -> list[str]:
    return [
        f"<code>{text(exact(arm[name]))}</code>" if name in arm.options else DASH for name in names
    ]


def _pairs(arm: Arm) -> list[str]:
    return [
        f'<code class="option">{text(name)}={text(exact(value))}</code>'
        for name, value in arm.options.items()
    ]


def branch(scenario: Scenario) -> str:
    """Return the code in which the arms differ."""
    found, absent = sources(scenario)
    parts = [
        f'<p class="sub"><code>{text(source.file)}</code>, <code>{text(source.name)}</code>'
        f" from line {source.first}</p>{source.html()}"
        for source in found
    ]
    if any(source.branches for source in found):
        parts.insert(0, '<p class="lead">Marked lines read what the arm is.</p>')
    if absent:
        parts.append(f'<p class="note">No source at hand for {text(", ".join(absent))}.</p>')
    return section("branch", "The code that differs between the arms", "".join(parts))


def again(layout: Layout, tables: Tables) -> str:
    """Return how to judge the run again and where the raw data is."""
    shown = _shown(layout.root)
    first = tables.plan.arms[0].name if tables.plan.arms else "arm"
    files = [
        (layout.verdict, "the findings, for scripts"),
        (layout.plan, "what the ranks were told"),
        (layout.config, "the configuration as it was resolved"),
        (layout.environment, "versions, source, host, command line"),
        (layout.arm(first).parent, "one stream of JSON lines per arm and rank, full precision"),
        (layout.parquet, "all records as one table, where it was made"),
        (layout.ranks, "how every process ended"),
    ]
    items = "".join(
        f"<div><dt><code>{text(path.relative_to(layout.root).as_posix())}</code></dt>"
        f"<dd>{words}</dd></div>"
        for path, words in files
    )
    load = f'from harness import load\ndf = load("{shown}")'
    return section(
        "again",
        "Judge it again",
        "<p>The run directory alone is enough; no rank is started.</p>"
        f'<pre class="code"><code>make judge run={text(shown)}</code></pre>'
        f'<pre class="code"><code>{text(load)}</code></pre>'
        f'<p>In <code>{text(shown)}</code>:</p><dl class="files">{items}</dl>',
    )


def environment(facts: Mapping[str, Any], config_text: str) -> str:
    """Return versions, source and host, then the resolved configuration."""
    pairs = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(cut(value, 2000))}</dd></div>"
        for name, value in _flat(facts)
    )
    known = f"<dl>{pairs}</dl>" if pairs else "<p>Nothing is known about it.</p>"
    config = f"<h3>Resolved configuration</h3>{pre(config_text)}" if config_text.strip() else ""
    return section("environment", "Environment", known + config)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield name, " ".join(str(item) for item in value)
        else:
            yield name, exact(value)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _shown(root: Path) -> str:
    """Return the run directory as one would type it from where the run was started."""
    relative = os.path.relpath(root)
    return str(root.absolute()) if relative.startswith("..") else Path(relative).as_posix()
