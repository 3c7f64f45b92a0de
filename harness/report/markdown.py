"""The verdict as markdown, to paste into an issue."""

from __future__ import annotations

import re

from harness.report.wording import CONCLUSIONS, judged, number, printable, tally
from harness.scenario import Scenario
from harness.verdict import Verdict

_SPECIAL = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)")


def text(scenario: Scenario, verdict: Verdict) -> str:
    """Return headline, conclusion and a table of the claims."""
    items = judged(scenario, verdict)
    short, _ = CONCLUSIONS[verdict.conclusion]
    lines = [
        f"**{_escape(verdict.headline)}**",
        "",
        f"Scenario {_escape(verdict.scenario)}, run {_escape(verdict.run_id)}: "
        f"{short}; {tally(items)}.",
        "",
        "| claim | kind | finding | expected | effect | floor | multiple | why |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for item in items:
        claim, finding = item.claim, item.finding
        effect = number(finding.effect)
        if finding.effect is not None and finding.unit:
            effect += f" {finding.unit}"
        outcome = finding.outcome.value
        cells = [
            _escape(claim.text),
            claim.kind.value,
            outcome if item.expected else f"**{outcome}**",
            claim.expects.value,
            _escape(effect),
            number(finding.floor),
            number(finding.multiple),
            _escape(finding.reason),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if verdict.failures:
        lines += ["", "Failures:", ""]
        lines += [f"- {_escape(failure)}" for failure in verdict.failures]
    return "\n".join(lines) + "\n"


def _escape(raw: str) -> str:
    """Make a text safe in a cell: it stays one line and starts no markup, no HTML."""
    line = " ".join(printable(raw).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(lambda match: "\\" + match.group(), line)
