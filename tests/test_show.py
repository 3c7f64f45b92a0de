"""What `make list` and `make show` say of scenarios, and of the runs there have been."""

from __future__ import annotations

import json
import os

import pytest

import scenarios
from harness.errors import UsageError
from launch import ending, list, show
from tests.ended_runs import ended

NAME = "ddp_forward_bypassed"


def test_a_scenario_is_shown_whole(tmp_path, capsys):
    assert show.main([f"scenario={NAME}", f"results={tmp_path}"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    scenario = scenarios.load(NAME)
    for claim in scenario.claims:
        assert claim.text in told, claim.name
    for arm in scenario.arms:
        assert f"{arm.name} {arm.role.value}" in told, arm.name
    assert '> output = model.module(x) if arm["bypassed"] else model(x)' in told
    assert "scenario.steps=8 of training on the same rows" in told
    assert "Cause: ddp_forward_bypassed" in told
    assert "kohya-ss/sd-scripts#989" in told
    assert f"none: type make repro scenario={NAME}" in told


def test_the_last_run_is_the_newest_however_it_ended(tmp_path, capsys):
    ended(tmp_path, NAME, "20260101T000000Z-a")
    ended(tmp_path, NAME, "20260102T000000Z-b", failures=["rank 1 was killed"], gpus=3)
    show.main([f"scenario={NAME}", f"results={tmp_path}"])
    told = capsys.readouterr().out
    assert "what 20260102T000000Z-b found" in told
    assert "rank 1 was killed" in told
    assert "3 ranks" in told


def test_of_runs_begun_in_one_second_the_later_one_is_the_last(tmp_path, capsys):
    names = ("20260101T000000Z-ffffff", "20260101T000000Z-aaaaaa")
    for nanoseconds, name in enumerate(names):
        os.utime(ended(tmp_path, NAME, name).plan, ns=(nanoseconds, nanoseconds))
    show.main([f"scenario={NAME}", f"results={tmp_path}"])
    assert f"what {names[-1]} found" in capsys.readouterr().out


def test_a_scenario_without_a_cause_has_no_such_section(tmp_path, capsys):
    name = next(n for n in scenarios.names() if not scenarios.load(n).cause)
    show.main([f"scenario={name}", f"results={tmp_path}"])
    assert "Cause" not in capsys.readouterr().out


def test_an_unknown_scenario_is_refused_with_the_nearest(capsys):
    assert ending.answered(lambda: show.main(["scenario=ddp_forward_bypased"])) == 2
    assert f"nearest: {NAME}" in capsys.readouterr().err


def lines(told):
    return {line.split()[0]: line for line in told.splitlines() if line.startswith("  ")}


def test_the_list_has_a_line_each_and_how_it_ended_here(tmp_path, capsys):
    ended(tmp_path, NAME, "20260101T000000Z-a", gpus=8)
    (claim, *_) = scenarios.load("loss_gap").claims
    ended(tmp_path, "loss_gap", "20260101T000000Z-a", outcomes={claim.name: "holds"})
    assert list.main([f"results={tmp_path}"]) == 0
    told = capsys.readouterr().out
    found = lines(told)
    assert set(found) == set(scenarios.names())
    assert "as expected, 8 ranks" in found[NAME]
    assert "UNEXPECTED, 2 ranks" in found["loss_gap"]
    assert found["metric_average"].split()[1] == "-"
    assert scenarios.load(NAME).title in found[NAME]
    assert "2 have run here" in told


def test_the_list_of_a_family_with_its_claims(tmp_path, capsys):
    list.main([f"results={tmp_path}", "family=hangs", "--claims"])
    told = capsys.readouterr().out
    names = [name for name in scenarios.names() if scenarios.load(name).family == "hangs"]
    assert set(lines(told)) - {"-"} == set(names)
    assert all(claim.text in told for name in names for claim in scenarios.load(name).claims)
    with pytest.raises(UsageError, match="nearest: hangs"):
        list.main(["family=hang"])


def test_one_broken_scenario_does_not_hide_the_others(tmp_path, monkeypatch, capsys):
    (tmp_path / "torn.py").write_text("SCENARIO = None +\n")
    monkeypatch.setenv("CROSSRANK_SCENARIOS", str(tmp_path))
    assert list.main([f"results={tmp_path}", "--json"]) == 2
    told = capsys.readouterr()
    assert "torn" in told.err
    found = {item["scenario"]: item for item in json.loads(told.out)}
    assert set(found) == set(scenarios.names()) - {"torn"}
    assert found[NAME]["last"] is None
