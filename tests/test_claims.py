"""The statements of the articles: all there, each decided by a claim or not to be run, with why."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter

import pytest

import scenarios
from harness.plan import write_text
from launch import claims, newest
from launch.statements import articles, merged, settling, statements
from tests.ended_runs import ended

STILL_OPEN: set[str] = set()
"""Statements that could be run here and that no claim decides yet; the list only shrinks."""
CASE = "gradient_self_test"
"""A scenario whose claims decide a statement each way."""


@pytest.fixture(scope="module")
def by():
    return settling(newest.own())


def test_every_statement_of_both_articles_is_there():
    count = Counter(name[0] for name in statements())
    assert count == {"A": 85, "B": 77}
    for letter in articles():
        numbers = [name for name in statements() if name.startswith(letter)]
        assert numbers == [f"{letter}{number:02}" for number in range(1, count[letter] + 1)]


def test_statements_are_sentences_and_name_no_finding():
    for name, statement in statements().items():
        assert re.fullmatch(r"[^.].*[^.]\.", statement.says), name
        assert not statement.reason.endswith("."), name
    assert len({statement.says for statement in statements().values()}) == len(statements())


def test_claims_name_statements_that_exist(by):
    assert set(by) - set(statements()) == set()


def test_what_can_be_run_is_decided_and_what_cannot_is_not(by):
    reasoned = {name for name, statement in statements().items() if statement.reason}
    assert set(by) & reasoned == set(), "decided, so take the reason away"
    assert set(statements()) - reasoned - set(by) - STILL_OPEN == set(), "decided by no claim"
    assert STILL_OPEN - set(statements()) | STILL_OPEN & reasoned == set()


@pytest.mark.parametrize(
    ("outcomes", "finding"),
    [
        ([], "not run"),
        (["holds", "holds"], "holds"),
        (["refuted"], "refuted"),
        (["holds", "refuted"], "partly"),
        (["holds", "refuted", "unknown"], "partly"),
        (["holds", "unknown"], "unknown"),
        (["refuted", "not run"], "not run"),
        (["unknown", "not run"], "unknown"),
    ],
)
def test_several_claims_make_one_finding(outcomes, finding):
    assert merged(outcomes) == finding
    assert merged(outcomes[::-1]) == finding


def row(results, name):
    return next(row for row in claims.rows(results) if row.statement.id == name)


def test_the_finding_is_that_of_the_newest_sound_run(tmp_path):
    (claim,) = {item.claim for item in settling([CASE])["A70"]}
    turned = {"outcomes": {claim: "holds"}, "numbers": {claim: {"effect": 1.5, "floor": 0.25}}}

    assert row(tmp_path, "A70").finding == "not run"
    ended(tmp_path, CASE, "20260101T000000Z-a", **turned)
    assert row(tmp_path, "A70").finding == "holds"
    ended(tmp_path / "corpus" / "20260102T000000Z", CASE, "20260102T000000Z-b")
    assert row(tmp_path, "A70").finding == "refuted"
    ended(tmp_path, CASE, "20260103T000000Z-c", failures=["rank 1 died"], **turned)
    other = newest.defaults(CASE) | {"trials": 9}
    ended(tmp_path, CASE, "20260104T000000Z-d", params=other, **turned)
    (tmp_path / CASE / "20260105T000000Z-e").mkdir()
    write_text(tmp_path / CASE / "20260105T000000Z-e" / "plan.json", "{}")
    assert row(tmp_path, "A70").finding == "refuted", "a run that says nothing of it was taken"
    ended(tmp_path, CASE, "20260106T000000Z-f", **turned)
    found = row(tmp_path, "A70")
    assert found.finding == "holds"
    assert "1.5, floor 0.25" in claims.markdown([found])


def test_a_claim_of_the_contrary_turns_the_finding(tmp_path):
    (item,) = settling(["rank_dependent_warmup"])["A36"]
    assert item.contrary
    ended(tmp_path, "rank_dependent_warmup", "20260101T000000Z-a")
    assert row(tmp_path, "A36").finding == "refuted"
    ended(tmp_path, "rank_dependent_warmup", "20260102T000000Z-a", outcomes={item.claim: "unknown"})
    assert row(tmp_path, "A36").finding == "unknown"


@pytest.fixture
def everything(tmp_path, by):
    """A run as expected of every scenario that decides a statement."""
    for name in {item.scenario for items in by.values() for item in items}:
        ended(tmp_path, name, "20260101T000000Z-a")
    return tmp_path


def test_the_table_is_written_and_found_up_to_date(everything, monkeypatch, capsys):
    monkeypatch.setattr(claims, "TABLE", everything / "CLAIMS.md")
    assert claims.main(["--check", f"--results={everything}"]) == 2
    assert claims.main([f"--results={everything}"]) == 0
    assert "162 statements" in capsys.readouterr().out
    assert claims.main(["--check"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not claims.TABLE.exists(), reason="make claims has not written it yet")
def test_the_table_of_this_repository_is_up_to_date():
    assert claims.outdated(claims.TABLE.read_text(encoding="utf-8")) == []


def test_each_change_of_the_table_is_found(everything):
    text = claims.markdown(claims.rows(everything))
    assert claims.outdated(text) == []
    line = next(line for line in text.splitlines() if line.startswith("| A70 |"))
    for changed, said in (
        (line.replace("| refuted |", "| holds |"), "A70"),
        (line.replace("near 1", "near 2"), "A70"),
        (line.replace(f"`{CASE}.", "`another."), "A70"),
        ("", "does not have A70"),
        (f"{line}\n{line.replace('A70', 'A99')}", "A99"),
    ):
        assert changed != line
        (told,) = claims.outdated(text.replace(line, changed))
        assert said in told


def test_a_finding_other_than_expected_is_out_of_date(tmp_path, by):
    (claim,) = {item.claim for item in by["A70"]}
    for name in {item.scenario for items in by.values() for item in items}:
        turned = {claim: "holds"} if name == CASE else {}
        ended(tmp_path, name, "20260101T000000Z-a", outcomes=turned)
    told = claims.outdated(claims.markdown(claims.rows(tmp_path)))
    assert told == ["says holds, not refuted, of A70"]


def test_nothing_is_written_while_a_scenario_has_not_been_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(claims, "TABLE", tmp_path / "CLAIMS.md")
    assert claims.main([f"--results={tmp_path}"]) == 12
    told = capsys.readouterr().err
    assert "type make corpus gpus=4, then make claims" in told
    assert len(told) < 250, "the names of all scenarios hide what to type"
    assert not (tmp_path / "CLAIMS.md").exists()


def test_few_scenarios_that_were_not_run_are_named(everything, monkeypatch, capsys):
    monkeypatch.setattr(claims, "TABLE", everything / "CLAIMS.md")
    for absent in (CASE, "rank_dependent_warmup"):
        shutil.rmtree(everything / absent)
    assert claims.main([f"--results={everything}"]) == 12
    named = ",".join(sorted([CASE, "rank_dependent_warmup"]))
    assert f"type make corpus gpus=4 scenarios={named}, then" in capsys.readouterr().err


def test_json_has_every_statement(tmp_path, capsys):
    ended(tmp_path, CASE, "20260101T000000Z-a")
    assert claims.main(["--json", f"--results={tmp_path}"]) == 0
    told = {item["id"]: item for item in json.loads(capsys.readouterr().out)}
    assert set(told) == set(statements())
    assert told["A70"]["finding"] == "refuted"
    assert [item["scenario"] for item in told["A70"]["by"]] == [CASE]
    assert told["A26"]["finding"] == "not run here"
    assert "TensorRT" in told["A26"]["reason"]


def test_every_scenario_can_be_asked_for_its_statements():
    assert set(newest.own()) <= set(scenarios.names())
