"""From the tables of a run to its verdict: one finding per claim, merged by fixed rules.

A judge that throws gives `unknown`, never a pass. A definite finding against what the scenario
expects outweighs an unknown one, an unknown one outweighs agreement, and a rank that failed makes
the whole run inconclusive.
"""

from __future__ import annotations

import dataclasses
import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from harness.errors import MissingRecord, RecordError
from harness.scenario import Claim, Finding, Outcome, Scenario, unknown
from harness.tables import Tables

SCHEMA = 1


class Conclusion(str, Enum):
    """What a run as a whole has come to."""

    AS_EXPECTED = "as_expected"
    UNEXPECTED = "unexpected"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """0, 10 or 11: what the command ends with."""
        return {"as_expected": 0, "unexpected": 10, "inconclusive": 11}[self.value]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one run says."""

    run_id: str
    scenario: str
    conclusion: Conclusion
    headline: str
    findings: Mapping[str, Finding]
    """By claim name, in the order of the scenario's claims."""
    failures: Sequence[str] = ()
    """What went wrong in the ranks, one sentence each; empty in a sound run."""
    judge_errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Traceback by claim name, where a judge raised."""

    def to_json(self, scenario: Scenario | None) -> str:
        """Return strict JSON: NaN and infinities stand as texts."""
        claims = {claim.name: claim for claim in scenario.claims} if scenario else {}
        data = {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "scenario": self.scenario,
            "conclusion": self.conclusion.value,
            "exit_code": self.conclusion.exit_code,
            "headline": self.headline,
            "findings": [
                _finding(name, finding, claims.get(name)) for name, finding in self.findings.items()
            ],
            "failures": list(self.failures),
        }
        return json.dumps(strict(data), indent=2, allow_nan=False) + "\n"


def decide(scenario: Scenario, name: str, tables: Tables, failures: Sequence[str] = ()) -> Verdict:
    """Judge every claim of a scenario; never raises because of what a judge does."""
    findings: dict[str, Finding] = {}
    errors: dict[str, str] = {}
    for claim in scenario.claims:
        try:
            finding: object = claim.judge(tables)
            if not isinstance(finding, Finding):
                raise TypeError(f"it returned {type(finding).__name__}, not a finding")
            findings[claim.name] = finding
        except (MissingRecord, RecordError) as missing:
            findings[claim.name] = unknown(str(missing))
        except Exception as error:
            findings[claim.name] = unknown(f"the judge raised {type(error).__name__}: {error}")
            errors[claim.name] = traceback.format_exc()
    conclusion = _merge(scenario.claims, findings, failures)
    try:
        headline = scenario.headline(findings)
    except Exception as error:
        headline = f"the headline raised {type(error).__name__}: {error}"
        errors["headline"] = traceback.format_exc()
    return Verdict(
        run_id=tables.plan.run_id,
        scenario=name,
        conclusion=conclusion,
        headline=headline,
        findings=findings,
        failures=tuple(failures),
        judge_errors=errors,
    )


def _merge(
    claims: Sequence[Claim], findings: Mapping[str, Finding], failures: Sequence[str]
) -> Conclusion:
    if failures:
        return Conclusion.INCONCLUSIVE
    outcomes = [(findings[claim.name].outcome, claim.expects) for claim in claims]
    if any(got not in (Outcome.UNKNOWN, expected) for got, expected in outcomes):
        return Conclusion.UNEXPECTED
    if any(got is Outcome.UNKNOWN for got, _ in outcomes) or not outcomes:
        return Conclusion.INCONCLUSIVE
    return Conclusion.AS_EXPECTED


def _finding(name: str, finding: Finding, claim: Claim | None) -> dict[str, Any]:
    data: dict[str, Any] = {"claim": name}
    if claim:
        data |= {"kind": claim.kind.value, "text": claim.text, "expects": claim.expects.value}
    return data | {
        "outcome": finding.outcome.value,
        "reason": finding.reason,
        "effect": finding.effect,
        "floor": finding.floor,
        "multiple": finding.multiple,
        "unit": finding.unit,
        "evidence": dict(finding.evidence),
    }


def strict(value: Any) -> Any:
    """Return the same data with NaN and infinities as the texts `nan`, `inf`, `-inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
