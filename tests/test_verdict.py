"""Merging findings: definite no > unknown > yes, a thrown judge is unknown, a dead rank decides."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from harness.scenario import Claim, Finding, Kind, Outcome, Scenario, holds, refuted, unknown
from harness.tables import Tables
from harness.verdict import Conclusion, decide
from tests import streams

YES, NO, OPEN = holds("it does"), refuted("it does not"), unknown("who knows")


def scenario(*pairs: tuple[Finding | Exception, Outcome]) -> Scenario:
    def answer(what: Finding | Exception) -> Any:
        def judge(tables: Tables) -> Finding:
            if isinstance(what, Exception):
                raise what
            return what

        return judge

    claims = [
        Claim(name=f"c{i}", kind=Kind.SYMPTOM, text="t", expects=expects, judge=answer(what))
        for i, (what, expects) in enumerate(pairs)
    ]
    return Scenario(
        title="t",
        family="f",
        cause="c",
        claims=claims,
        arms=(),
        params=object,
        run=lambda rank, arm, p: None,
        headline=lambda findings: "headline",
    )


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables.read(streams.write(tmp_path, streams.plan({"a": 1}), []))


@pytest.mark.parametrize(
    ("pairs", "conclusion"),
    [
        ([(YES, Outcome.HOLDS), (NO, Outcome.REFUTED)], Conclusion.AS_EXPECTED),
        ([(YES, Outcome.REFUTED)], Conclusion.UNEXPECTED),
        ([(NO, Outcome.HOLDS)], Conclusion.UNEXPECTED),
        ([(OPEN, Outcome.HOLDS)], Conclusion.INCONCLUSIVE),
        ([(OPEN, Outcome.HOLDS), (NO, Outcome.HOLDS)], Conclusion.UNEXPECTED),
        ([(OPEN, Outcome.HOLDS), (YES, Outcome.HOLDS)], Conclusion.INCONCLUSIVE),
        ([], Conclusion.INCONCLUSIVE),
    ],
)
def test_merge(tables: Tables, pairs: list, conclusion: Conclusion) -> None:
    assert decide(scenario(*pairs), "s", tables).conclusion is conclusion


def test_exit_codes() -> None:
    assert [c.exit_code for c in Conclusion] == [0, 10, 11]


def test_a_failed_rank_makes_even_agreement_inconclusive(tables: Tables) -> None:
    verdict = decide(scenario((YES, Outcome.HOLDS)), "s", tables, ["rank 1 was killed"])
    assert verdict.conclusion is Conclusion.INCONCLUSIVE
    assert verdict.findings["c0"].outcome is Outcome.HOLDS


def test_a_judge_that_throws_is_unknown_and_leaves_its_trace(tables: Tables) -> None:
    verdict = decide(
        scenario((ZeroDivisionError("oops"), Outcome.HOLDS), (YES, Outcome.HOLDS)), "s", tables
    )
    assert verdict.findings["c0"].outcome is Outcome.UNKNOWN
    assert "ZeroDivisionError: oops" in verdict.findings["c0"].reason
    assert "Traceback" in verdict.judge_errors["c0"]
    assert verdict.findings["c1"].outcome is Outcome.HOLDS
    assert verdict.conclusion is Conclusion.INCONCLUSIVE


@pytest.mark.parametrize("what", [None, True, "holds", Outcome.HOLDS])
def test_a_judge_that_returns_no_finding_is_unknown(tables: Tables, what: Any) -> None:
    verdict = decide(scenario((what, Outcome.HOLDS)), "s", tables)
    assert verdict.findings["c0"].outcome is Outcome.UNKNOWN
    assert type(what).__name__ in verdict.findings["c0"].reason
    assert verdict.conclusion is Conclusion.INCONCLUSIVE


def test_json_is_strict_even_with_nan(tables: Tables) -> None:
    odd = holds("odd", effect=math.inf, floor=math.nan, evidence={"x": -math.inf, "n": math.nan})
    made = scenario((odd, Outcome.HOLDS))
    text = decide(made, "s", tables).to_json(made)
    data = json.loads(text, parse_constant=lambda word: pytest.fail(f"bare {word}"))
    assert data["findings"][0]["effect"] == "inf"
    assert data["findings"][0]["evidence"] == {"x": "-inf", "n": "nan"}
    assert data["findings"][0]["multiple"] is None


def test_multiple_of_a_floor() -> None:
    assert holds("", effect=3.0, floor=1.5).multiple == 2.0
    assert holds("", effect=3.0, floor=0.0).multiple == math.inf
    assert holds("", effect=0.0, floor=0.0).multiple == 0.0
    assert holds("", effect=3.0).multiple is None
