"""A run directory is enough: judged again elsewhere, damaged, mutated, listed, reported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import scenarios
from harness.plan import Layout
from launch import doctor
from launch import judge as judging
from launch import list as listing
from launch import report as reporting
from launch.runs import begun
from tests.launching import ROOT, environment, launch, verdict_of


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A sound run of two ranks, which no test may change."""
    results = tmp_path_factory.mktemp("results")
    run = launch("scenario=probe", "gpus=2", "scenario.steps=2", results=results)
    assert run.code == 0, run.out
    return run.layout


@pytest.fixture
def run(original, tmp_path):
    """The same run, moved to another place."""
    root = tmp_path / "moved here" / "run"
    shutil.copytree(original.root, root)
    return Layout(root)


def judge(capsys, *arguments):
    code = judging.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_moved_run_is_judged_the_same_and_nothing_is_written(run, capsys):
    before = contents(run.root)

    code, out, err = judge(capsys, run.root)

    assert (code, err) == (0, "")
    assert "the stored verdict stands" in out
    assert "differs" not in out
    assert "as expected" in out
    assert contents(run.root) == before


def test_the_judge_needs_neither_torch_nor_the_reports(run):
    for path in (run.report, run.junit, run.markdown, run.parquet, run.environment, run.config):
        path.unlink()
    code = (
        "import sys; sys.modules['torch'] = None; from launch.judge import main; sys.exit(main())"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(run.root)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert "the stored verdict stands" in done.stdout


def test_json_is_the_stored_verdict(run, capsys):
    code, out, _ = judge(capsys, run.root, "--json")

    assert code == 0
    assert json.loads(out) == verdict_of(run)


def test_a_changed_record_gives_another_verdict_and_says_where(run, capsys):
    for rank in (0, 1):
        change(run.stream("sum", rank), '"total":1.0', '"total":2.0')

    code, out, _ = judge(capsys, run.root)

    assert code == 10
    assert "differs  conclusion: as_expected -> unexpected" in out
    assert "differs  sums: outcome holds -> refuted" in out
    assert "differs  sums: effect 0.0 -> 1.0" in out
    assert "stored verdict stands" not in out


@pytest.mark.parametrize("lost", ["rank1.jsonl", "."])
def test_missing_records_are_not_agreement(run, capsys, lost):
    gone = run.arm("faulty") / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()

    code, out, _ = judge(capsys, run.root)

    assert code == 11
    assert "no records of rank" in " ".join(out.split())


def test_a_cut_stream_is_inconclusive(run, capsys):
    path = run.stream("sum", 1)
    path.write_bytes(path.read_bytes()[:-10])

    code, out, _ = judge(capsys, run.root)

    assert code == 11
    assert "differs  conclusion: as_expected -> inconclusive" in out


def test_a_damaged_stream_is_named_by_file_and_line(run, capsys):
    path = run.stream("sum", 1)
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = lines[2][:20] + "#" + lines[2][21:]
    path.write_text("".join(lines))

    code, out, err = judge(capsys, run.root)

    assert code == 12
    assert f"crossrank: {path}:3: damaged record" in err
    assert out == ""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plan.json", "{}", "not a plan"),
        ("plan.json", "[1", "not a plan"),
        ("plan.json", '{"schema": 99}', "schema 99, this version reads schema 1"),
        ("ranks.json", "[1]", "cannot read"),
        ("ranks.json", "{", "cannot read"),
        ("verdict.json", "[]", "holds no JSON object"),
        ("verdict.json", "{", "cannot read"),
    ],
)
def test_a_damaged_file_is_one_message(run, capsys, name, text, message):
    (run.root / name).write_text(text)

    code, out, err = judge(capsys, run.root)

    assert (code, out) == (12, "")
    assert err.startswith("crossrank: ")
    assert message in err
    assert "Traceback" not in err


def test_records_of_another_run_are_refused(run, capsys):
    change(
        run.plan, run_id := json.loads(run.plan.read_text())["run_id"], "20200101T000000Z-000000"
    )

    code, _, err = judge(capsys, run.root)

    assert code == 12
    assert f"holds records of run {run_id}, the plan is of run 20200101T000000Z-000000" in err


def test_a_run_without_verdict_says_so(run, capsys):
    run.verdict.unlink()

    code, out, _ = judge(capsys, run.root)

    assert code == 0
    assert "there is no stored verdict" in out


def test_a_run_whose_launcher_was_killed_is_inconclusive(run, capsys):
    run.ranks.unlink()

    code, out, _ = judge(capsys, run.root)

    assert code == 11
    assert "ranks.json is missing" in " ".join(out.split())


def test_a_scenario_that_is_unknown_here_is_named(run, capsys):
    plan = json.loads(run.plan.read_text())
    run.plan.write_text(json.dumps(plan | {"scenario": "prob"}))
    for stream in (run.root / "records").rglob("*.jsonl"):
        change(stream, '"scenario":"probe"', '"scenario":"prob"')

    code, _, err = judge(capsys, run.root)

    assert code == 2
    assert "no scenario named 'prob'; nearest: probe" in err


def test_the_newest_run_is_found_from_where_it_lies(original, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    older, newer = (tmp_path / "results" / "probe" / name for name in ("a-newer-name", "a-name"))
    for number, root in enumerate((older, newer)):
        shutil.copytree(original.root, root)
        os.utime(root / "plan.json", (1000 + number, 1000 + number))

    for typed in ("latest", "results", "results/probe", str(newer)):
        code, out, _ = judge(capsys, typed)
        assert code == 0
        assert f"judged again: {newer.resolve()}" in "".join(out.split("\n"))


@pytest.mark.parametrize("typed", ["nowhere", "latest", ""])
def test_what_is_no_run_is_said_with_what_to_type(tmp_path, monkeypatch, capsys, typed):
    monkeypatch.chdir(tmp_path)

    code, out, err = judge(capsys, typed)

    assert (code, out) == (2, "")
    assert "holds no plan.json" in err
    assert "type run=results/SCENARIO/RUN, or run=latest" in err


def test_a_wrong_run_lists_the_newest_ones(original, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = []
    for number in range(5):
        scenario = ("probe", "another")[number % 2]
        made.append(Path("results") / scenario / f"2026010{number}T000000Z-abcdef")
        made[-1].mkdir(parents=True)
        (made[-1] / "plan.json").touch()

    _, _, err = judge(capsys, "nowhere")

    shown = [line.strip() for line in err.splitlines() if "/2026" in line]
    assert shown == [str(run) for run in made[2:]]


def test_runs_begun_in_one_second_come_in_the_order_of_their_plans(tmp_path):
    names = ("20260101T000000Z-ffffff", "20260101T000000Z-aaaaaa", "20260101T000001Z-000000")
    made = [tmp_path / name for name in names]
    for number, run in enumerate(made):
        run.mkdir()
        (run / "plan.json").touch()
        # what was copied has lost the order, which only counts within a second
        os.utime(run / "plan.json", ns=(5 + number % 2, 5 + number % 2))

    assert sorted(reversed(made), key=begun) == made


def test_a_run_with_a_name_of_its_own_began_when_its_plan_was_written(tmp_path):
    made = [tmp_path / name for name in ("20260101T000000Z-ffffff", "mine", "20260101T000002Z-a")]
    for run in made:
        run.mkdir()
        (run / "plan.json").touch()
        os.utime(run / "plan.json", (1767225601, 1767225601))  # 2026-01-01, 00:00:01

    assert sorted(reversed(made), key=begun) == made


def test_the_report_is_written_again(run, capsys):
    for path in (run.report, run.markdown, run.junit):
        path.unlink()

    code = reporting.main([str(run.root)])

    assert code == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(path.resolve()) for path in (run.report, run.markdown, run.junit)]
    assert all(path.stat().st_size for path in (run.report, run.markdown, run.junit))


def test_the_report_of_no_run_is_a_message(tmp_path, capsys):
    assert reporting.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"crossrank: no run in {tmp_path}")


def test_the_list_names_every_scenario_with_its_claims(capsys):
    assert listing.main(["--claims"]) == 0
    text = capsys.readouterr().out
    assert "All ranks hold the same sum, even a wrong one." in text

    assert listing.main(["--json"]) == 0
    rows = {row["scenario"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"probe", "syncbn_clip", "logsoftmax_drift"} <= set(rows)
    assert rows["probe"]["arms"] == ["alone", "sum", "faulty", "isolated"]


@pytest.mark.parametrize("columns", [None, 60, 80, 110])
def test_the_list_fits_the_terminal_and_loses_no_word(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns or 60))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None, raising=False)
    assert listing.main(["family=hangs", "claims=true"]) == 0
    body, _, _ = capsys.readouterr().out.partition("\n\n")
    assert (max(map(len, body.splitlines())) <= (columns or 60)) is (columns is not None)
    words = body.split()
    for name, scenario in ((n, scenarios.load(n)) for n in scenarios.names()):
        if scenario.family == "hangs":
            start = words.index(name)
            said = " ".join(words[start:])
            assert scenario.title in said
            assert all(claim.text in said for claim in scenario.claims)


def test_the_doctor_prints_facts_as_json_and_finds_what_is_wrong(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert doctor.main() == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["torch"]
    assert facts["engines"][-1] == "torchrun"

    monkeypatch.setattr("launch.environment._version", lambda name: None)
    assert doctor.main() == 12
    said = capsys.readouterr().err
    assert "torch is not installed for this Python" in said
    targets = re.search(
        r"^TARGETS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert targets is not None
    assert re.findall(r"type make (\S+)", said)[0].rstrip(",") in targets[1].split()


def test_one_broken_scenario_hides_no_other(tmp_path):
    (tmp_path / "broken.py").write_text("def x(:\n")
    (tmp_path / "raising.py").write_text("x = 1\nraise KeyError('y')\n")
    done = subprocess.run(
        [sys.executable, "-m", "launch.list"],
        cwd=ROOT,
        env=environment(CROSSRANK_SCENARIOS=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "syncbn_clip" in done.stdout
    assert "scenario broken cannot be imported: SyntaxError" in done.stderr
    assert f"KeyError: 'y' at {tmp_path / 'raising.py'}:2" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_of_scenarios_that_is_not_there_is_named(tmp_path):
    done = launch("scenario=probe", results=tmp_path, CROSSRANK_SCENARIOS=str(tmp_path / "gone"))
    assert done.code == 2
    assert done.err.strip().endswith(f"{tmp_path / 'gone'}, which is no directory")
