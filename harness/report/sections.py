"""The sections of the page that are text and tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from harness.floor import CLEAN, FAULT
from harness.plan import Layout
from harness.report.source import sources
from harness.report.wording import (
    CONCLUSIONS,
    Judged,
    arm_status,
    judged,
    number,
    printable,
    tally,
)
from harness.scenario import Arm, Finding, Outcome, Scenario
from harness.tables import Tables
from harness.verdict import Verdict

LONGEST = 20_000
"""Characters shown of a trace, a configuration or a list of failures; the files have the rest."""
WIDEST = 4
"""Up to so many options get a column each; more would hide how the ranks ended."""
_SIGNS = {Outcome.HOLDS: "✓", Outcome.REFUTED: "✕", Outcome.UNKNOWN: "?"}


def text(raw: object) -> str:
    """Return anything as escaped text."""
    return escape(printable(str(raw)))


def ident(kind: str, name: str) -> str:
    """Return an id for a named thing that is a legal fragment whatever the name is."""
    safe = "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}" for c in name)
    return f"{kind}-{safe}"


def section(name: str, title: str, body: str) -> str:
    """Return one section with its heading."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{title}</h2>'
        f"{body}</section>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: int = 99) -> str:
    """Return a table in a box that scrolls by itself; cells are HTML, `head` is text.

    A cell that is a whole `<th>` or `<td>` stays one; columns from `numeric` on are numbers.
    """
    columns = "".join(
        f'<th scope="col"{" class=num" if i >= numeric else ""}>{text(name)}</th>'
        for i, name in enumerate(head)
    )
    body = []
    for row in rows:
        cells = [
            cell
            if cell.startswith(("<th", "<td"))
            else f"<td{' class=num' if i >= numeric else ''}>{cell}</td>"
            for i, cell in enumerate(row)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


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
        f"started by {plan.engine}",
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
    nav = "".join(f'<a href="#{target}">{label}</a>' for target, label in links)
    return (
        f'<header><p class="crumb"><b>crossrank</b> {text(scenario.family)} / '
        f"<code>{text(name)}</code></p>"
        f'<h1>{text(verdict.headline)}</h1><p class="title">{text(scenario.title)}</p>'
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
    items = "".join(f"<li>{text(_cut(failure, 2000))}</li>" for failure in shown)
    if len(verdict.failures) > len(shown):
        items += f"<li>and {len(verdict.failures) - len(shown)} more, in verdict.json</li>"
    body = f"<ul>{items}</ul>" if items else ""
    if broken:
        body += f"<p>The headline could not be made:</p>{_pre(broken)}"
    return f'<div class="failures">{section("failures", "What went wrong", body)}</div>'


def claims(scenario: Scenario, verdict: Verdict) -> str:
    """Return the table of claims."""
    columns = ["Claim", "Finding", "Expected", "Effect", "Floor", "Effect / floor"]
    head_cells = "".join(
        f'<th scope="col"{" class=num" if i > 2 else ""}>{name}</th>'
        for i, name in enumerate(columns)
    )
    rows = "".join(_claim(item, verdict) for item in judged(scenario, verdict))
    note = (
        '<p class="note">The floor is what rounding alone moved in this run. An effect of up to '
        f"{CLEAN:g} floors is rounding, one of {FAULT:g} floors or more is not, and between the "
        "two nothing is said. A claim without a floor is decided by counting or bit for bit.</p>"
    )
    body = (
        '<table class="claims"><thead><tr>'
        f"{head_cells}</tr></thead><tbody>{rows}</tbody></table>{note}"
    )
    return section("claims", "Claims", body)


def _claim(item: Judged, verdict: Verdict) -> str:
    claim, finding = item.claim, item.finding
    outcome = finding.outcome
    source = f' <span class="source">{text(claim.source)}</span>' if claim.source else ""
    trace = verdict.judge_errors.get(claim.name, "")
    match = "" if item.expected else ' class="off"'
    unit = f'<small class="unit">{text(finding.unit)}</small>' if finding.unit else ""
    effect = f"{number(finding.effect)} {unit}" if finding.effect is not None else "–"
    multiple = number(finding.multiple)
    if finding.multiple is not None:
        multiple += f" {_ruler(finding)}"
    expected = claim.expects.value if item.expected else f"<b>{claim.expects.value}</b>"
    return (
        f'<tr id="{ident("claim", claim.name)}"{match}><th scope="row">'
        f'<p class="claim">{text(claim.text)}</p>'
        f'<p class="reason">{text(finding.reason)}</p>'
        f'<p class="meta"><span class="kind">{claim.kind.value}</span> '
        f"<code>{text(claim.name)}</code>{source}</p>{_evidence(finding, trace)}</th>"
        f'<td data-l="Finding"><span class="outcome {outcome.value}">'
        f'<span aria-hidden="true">{_SIGNS[outcome]}</span> {outcome.value}</span></td>'
        f'<td data-l="Expected">{expected}</td>'
        f'<td class="num" data-l="Effect">{effect}</td>'
        f'<td class="num" data-l="Floor">{number(finding.floor)}</td>'
        f'<td class="num" data-l="Effect / floor">{multiple}</td></tr>'
    )


def _evidence(finding: Finding, trace: str) -> str:
    parts = []
    if finding.evidence:
        pairs = "".join(
            f"<div><dt>{text(name)}</dt><dd>{text(_exact(value))}</dd></div>"
            for name, value in finding.evidence.items()
        )
        parts.append(
            f"<details><summary>Evidence ({len(finding.evidence)})</summary>"
            f"<dl>{pairs}</dl></details>"
        )
    if trace:
        parts.append(f"<details><summary>The judge raised</summary>{_pre(trace)}</details>")
    return "".join(parts)


def _ruler(finding: Finding) -> str:
    """Draw where the effect stands between rounding and fault, on a scale of powers of ten."""
    multiple = finding.multiple
    if multiple is None or math.isnan(multiple):
        return ""

    def place(value: float) -> float:
        return 4 + 92 * (min(max(math.log10(value) if value > 0 else -2, -2), 6) + 2) / 8

    clean, fault = place(CLEAN), place(FAULT)
    at = place(multiple) if math.isfinite(multiple) else 96.0
    side = "rounding" if multiple <= CLEAN else "no rounding" if multiple >= FAULT else "between"
    return (
        '<svg class="ruler" width="100" height="12" role="img" '
        f'aria-label="{side}: {number(multiple)} floors"><title>{side}</title>'
        f'<rect class="clean" x="0" y="4" width="{clean:.0f}" height="4"/>'
        f'<rect class="between" x="{clean:.0f}" y="4" width="{fault - clean:.0f}" height="4"/>'
        f'<rect class="fault" x="{fault:.0f}" y="4" width="{100 - fault:.0f}" height="4"/>'
        f'<circle cx="{at:.1f}" cy="6" r="4.5"/></svg>'
    )


def arms(scenario: Scenario, tables: Tables, colours: Mapping[str, int]) -> str:
    """Return the arms beside each other: role, what differs, options, how its ranks ended."""
    options = list(dict.fromkeys(name for arm in scenario.arms for name in arm.options))
    wide = len(options) <= WIDEST
    rows = []
    for arm in scenario.arms:
        status = "<br>".join(
            f'<span class="{"done" if sound else "bad"}">{text(_cut(words, 400))}</span>'
            for words, sound in arm_status(tables, arm.name)
        )
        planned = next((plan for plan in tables.plan.arms if plan.name == arm.name), None)
        repeats = str(planned.repeats) if planned else "–"
        cells = [
            f'<th scope="row" id="{ident("arm", arm.name)}">'
            f'<span class="swatch c{colours[arm.name]}"></span>{text(arm.name)}</th>',
            f'<span class="role {arm.role.value}">{arm.role.value}</span>',
            f'<td class="about">{text(arm.about)}</td>',
            *(_options(arm, options) if wide else [" ".join(_pairs(arm))]),
            repeats,
            status,
        ]
        rows.append(cells)
    columns = ["Arm", "Role", "What differs", *(options if wide else ["Options"]), "Repeats", "Ranks"]
    return section("arms", "Arms side by side", table(columns, rows))


def _options(arm: Arm, names: Sequence[str]) -> list[str]:
    return [
        f"<code>{text(_exact(arm[name]))}</code>" if name in arm.options else "–" for name in names
    ]


def _pairs(arm: Arm) -> list[str]:
    return [
        f'<code class="option">{text(name)}={text(_exact(value))}</code>'
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
        parts.append(
            f'<p class="note">No source at hand for {text(", ".join(absent))}.</p>'
        )
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
        f"<div><dt>{text(name)}</dt><dd>{text(_cut(value, 2000))}</dd></div>"
        for name, value in _flat(facts)
    )
    known = f"<dl>{pairs}</dl>" if pairs else "<p>Nothing is known about it.</p>"
    config = (
        f"<h3>Resolved configuration</h3>{_pre(config_text)}" if config_text.strip() else ""
    )
    return section("environment", "Environment", known + config)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield name, " ".join(str(item) for item in value)
        else:
            yield name, _exact(value)


def _exact(value: object) -> str:
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(
        value, bool
    ) else str(value)


def _cut(raw: str, most: int) -> str:
    return raw if len(raw) <= most else f"{raw[:most]} … ({len(raw) - most} more characters)"


def _pre(raw: str) -> str:
    return f'<pre class="code" tabindex="0"><code>{text(_cut(raw, LONGEST))}</code></pre>'


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _shown(root: Path) -> str:
    """Return the run directory as one would type it from where the run was started."""
    relative = os.path.relpath(root)
    return str(root.absolute()) if relative.startswith("..") else Path(relative).as_posix()
