"""The table of claims: what was found about each, against which floor, on what evidence."""

from __future__ import annotations

import math

from harness.floor import CLEAN, FAULT
from harness.report.markup import exact, ident, pre, section, text
from harness.report.wording import DASH, Judged, judged, number
from harness.scenario import Finding, Outcome, Scenario
from harness.verdict import Verdict

_SIGNS = {Outcome.HOLDS: "✓", Outcome.REFUTED: "✕", Outcome.UNKNOWN: "?"}


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
        "two nothing is said. <i>Exact</i> is what was decided by counting or bit for bit.</p>"
    )
    body = (
        '<table class="claims"><thead><tr>'
        f"{head_cells}</tr></thead><tbody>{rows}</tbody></table>{note}"
    )
    return section("claims", "Claims", body)


def _claim(item: Judged, verdict: Verdict) -> str:
    claim, finding = item.claim, item.finding
    outcome = finding.outcome
    source = f' · <span class="source">{text(claim.source)}</span>' if claim.source else ""
    trace = verdict.judge_errors.get(claim.name, "")
    match = "" if item.expected else ' class="off"'
    unit = f'<small class="unit">{text(finding.unit)}</small>' if finding.unit else ""
    effect = f"{number(finding.effect)} {unit}" if finding.effect is not None else DASH
    multiple = number(finding.multiple)
    if finding.multiple is not None:
        multiple += f" {_ruler(finding)}"
    exact_ = finding.floor is None and outcome is not Outcome.UNKNOWN
    floor = '<span class="exact">exact</span>' if exact_ else number(finding.floor)
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
        f"{_number('Effect', effect)}{_number('Floor', floor)}"
        f"{_number('Effect / floor', multiple)}</tr>"
    )


def _number(label: str, cell: str) -> str:
    # A narrow screen stacks the cells and can do without those that say nothing.
    look = "num none" if cell == DASH else "num"
    return f'<td class="{look}" data-l="{label}">{cell}</td>'


def _evidence(finding: Finding, trace: str) -> str:
    parts = []
    if finding.evidence:
        pairs = "".join(
            f"<div><dt>{text(name)}</dt><dd>{text(exact(value))}</dd></div>"
            for name, value in finding.evidence.items()
        )
        parts.append(
            f"<details><summary>Evidence ({len(finding.evidence)})</summary>"
            f"<dl>{pairs}</dl></details>"
        )
    if trace:
        parts.append(f"<details><summary>The judge raised</summary>{pre(trace)}</details>")
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
