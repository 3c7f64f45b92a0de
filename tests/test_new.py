"""The two files of a new scenario run at once, say what is missing, and pass the linters."""

from __future__ import annotations

import subprocess
import sys

import pytest

import scenarios
from harness.errors import PrerequisiteError, UsageError
from launch import new
from tests.launching import ROOT, launch


@pytest.fixture
def written(tmp_path):
    """A folder of scenarios with a new one."""
    folder = tmp_path / "mine"
    assert new.main(["scenario=just_begun", "family=buffers", f"folder={folder}"]) == 0
    return folder


def test_it_runs_at_once_and_says_that_nothing_is_decided(written, tmp_path):
    run = launch(
        "scenario=just_begun",
        "gpus=2",
        "device=cpu",
        results=tmp_path / "results",
        CROSSRANK_SCENARIOS=str(written),
    )
    assert run.code == 11, run.out + run.err
    assert run.verdict["failures"] == []
    for finding in run.verdict["findings"]:
        assert finding["outcome"] == "unknown"
        assert finding["reason"].startswith("not decided yet")
    assert "not decided yet" in run.out


def test_it_passes_the_linters(written):
    path = written / "just_begun.py"
    for command in (
        ["ruff", "check", "--config", str(ROOT / "pyproject.toml")],
        ["ruff", "format", "--check", "--config", str(ROOT / "pyproject.toml")],
        ["mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")],
    ):
        answer = subprocess.run(
            [sys.executable, "-m", *command, str(path)], cwd=ROOT, capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr


def test_it_is_found_with_what_was_typed(written, monkeypatch):
    monkeypatch.setenv("CROSSRANK_SCENARIOS", str(written))
    scenario = scenarios.load("just_begun")
    assert scenario.family == "buffers"
    values = (written / "conf" / "scenario" / "just_begun.yaml").read_text()
    assert all("#" in line for line in values.splitlines())


def test_nothing_is_overwritten(written):
    before = (written / "just_begun.py").read_text() + "# mine\n"
    (written / "just_begun.py").write_text(before)
    with pytest.raises(UsageError, match=r"just_begun\.py .*exists already"):
        new.main(["scenario=just_begun", f"folder={written}"])
    (written / "just_begun.py").unlink()
    with pytest.raises(UsageError, match=r"just_begun\.yaml exists already"):
        new.main(["scenario=just_begun", f"folder={written}"])
    assert not (written / "just_begun.py").exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("My-Case", "type scenario=my_case"),
        ("_hidden", "type scenario=hidden"),
        ("class", "will not do"),
        ("1st", "type scenario=st"),
        ("loss_gap", "make show scenario=loss_gap"),
    ],
)
def test_names_that_will_not_do_are_refused(name, told, tmp_path):
    with pytest.raises(UsageError, match=told):
        new.main([f"scenario={name}", f"folder={tmp_path}"])
    assert not any(tmp_path.iterdir())


def test_a_cause_has_to_be_in_the_catalogue(tmp_path):
    with pytest.raises(UsageError, match="nearest: bn_stats_local"):
        new.main(["scenario=x", "cause=bn_stat_local", f"folder={tmp_path}"])


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PrerequisiteError, match="cannot write"):
        new.main(["scenario=x", f"folder={tmp_path / 'file' / 'below'}"])
