"""The verdict as JUnit XML: one test case per claim, so that a CI system can show it.

A claim that came out otherwise than expected is a failure, one that could not be decided an error.
"""

from __future__ import annotations

from html import escape

from harness.plan import Layout, write_text
from harness.report.wording import Judged, judged, number, printable
from harness.scenario import Outcome, Scenario
from harness.verdict import Verdict


def write(layout: Layout, scenario: Scenario, verdict: Verdict) -> None:
    """Write `junit.xml`.

    Raises:
        RecordError: if the file cannot be written.
    """
    write_text(layout.junit, text(scenario, verdict))


def text(scenario: Scenario, verdict: Verdict) -> str:
    """Return the verdict as a JUnit file with one test suite."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<testsuites>{suite(scenario, verdict)}</testsuites>\n"
    )


def suite(scenario: Scenario, verdict: Verdict) -> str:
    """Return the verdict as one JUnit test suite, which others may stand beside."""
    items = judged(scenario, verdict)
    cases = [_case(item, verdict) for item in items]
    undecided = sum(not item.expected and _undecided(item) for item in items)
    failed = sum(not item.expected for item in items) - undecided
    if verdict.failures:
        problems = "".join(
            f'<error type="rank" message="{_attribute(failure)}">{_text(failure)}</error>'
            for failure in verdict.failures[:1]
        )
        rest = "\n".join(verdict.failures)
        cases.append(
            f'<testcase classname="{_attribute(verdict.scenario)}" name="ranks">'
            f"{problems}<system-err>{_text(rest)}</system-err></testcase>"
        )
        undecided += 1
    head = (
        f'<testsuite name="{_attribute(verdict.scenario)}" tests="{len(cases)}" '
        f'failures="{failed}" errors="{undecided}" skipped="0">'
        f'<properties><property name="run" value="{_attribute(verdict.run_id)}"/>'
        f'<property name="conclusion" value="{verdict.conclusion.value}"/>'
        f'<property name="headline" value="{_attribute(verdict.headline)}"/></properties>'
    )
    body = "\n".join(cases)
    return f"{head}\n{body}\n</testsuite>"


def _case(item: Judged, verdict: Verdict) -> str:
    claim, finding = item.claim, item.finding
    problem = ""
    if not item.expected:
        tag = "error" if _undecided(item) else "failure"
        message = f"{finding.outcome.value}, expected {claim.expects.value}: {finding.reason}"
        trace = verdict.judge_errors.get(claim.name, finding.reason)
        problem = (
            f'<{tag} type="{finding.outcome.value}" message="{_attribute(message)}">'
            f"{_text(trace)}</{tag}>"
        )
    lines = [
        f"claim: {claim.text}",
        f"finding: {finding.outcome.value} (expected {claim.expects.value}): {finding.reason}",
        f"effect: {number(finding.effect, 6)} {finding.unit}".rstrip(),
        f"floor: {number(finding.floor, 6)}; effect / floor: {number(finding.multiple, 6)}",
        *(f"{name} = {value!r}" for name, value in finding.evidence.items()),
    ]
    return (
        f'<testcase classname="{_attribute(verdict.scenario)}" name="{_attribute(claim.name)}">'
        f"{problem}<system-out>{_text(chr(10).join(lines))}</system-out></testcase>"
    )


def _undecided(item: Judged) -> bool:
    return item.finding.outcome is Outcome.UNKNOWN


def _text(raw: str) -> str:
    return escape(printable(raw), quote=False)


def _attribute(raw: str) -> str:
    # An XML parser turns a bare line break or tab in an attribute into a blank.
    return escape(printable(raw)).replace("\n", "&#10;").replace("\t", "&#9;")
