"""A corpus without ranks: what it is made of, who runs beside whom, what two of them differ in."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from pathlib import Path

import pytest

import scenarios
from harness.errors import PrerequisiteError, RecordError, UsageError
from harness.scenario import Role
from launch import command, ending, newest, runs
from launch import config as configuration
from launch.compose import compose
from launch.corpus import __main__ as corpus
from launch.corpus import comparing, diff, record, session
from launch.corpus.cases import Case, cases, chosen
from launch.corpus.pool import Pool, Stoppable, Stopped
from launch.corpus.record import Corpus, Entry, find
from launch.environment import torch_version
from launch.reproduce import point_key
from tests.ended_runs import ended


def made(names=(), family="", gpus=(2,), **more):
    given = {"seed": 0, "device": "cpu", "launch": "auto", "results": Path("results")} | more
    return cases(names, family, gpus, **given)


@pytest.mark.parametrize("name", ["metric_average", "syncbn_clip", "probe"])
def test_a_configuration_is_the_one_hydra_composes(name, tmp_path):
    found = []
    words = [f"scenario={name}", "gpus=4", "seed=3", "device=cpu", f"results={tmp_path}"]
    command.compose(words, lambda cfg: found.append(configuration.read(cfg)))
    ours = compose(name, gpus=4, seed=3, device="cpu", results=tmp_path)
    assert [ours] == found


def test_a_configuration_takes_other_values_and_refuses_wrong_ones(tmp_path):
    config = compose("metric_average", gpus=2, results=tmp_path, params={"sets": 7})
    assert config.params["sets"] == 7
    assert dict(config.params) == newest.defaults("metric_average") | {"sets": 7}
    with pytest.raises(UsageError, match="sets"):
        compose("metric_average", gpus=2, results=tmp_path, params={"sets": "many"})


def test_what_is_not_for_so_many_ranks_is_skipped_with_the_reason():
    one, two, seven = made(["metric_average"], gpus=(1, 2, 7))
    assert (one.state, two.state, seven.state) == ("skipped", "", "skipped")
    assert "at least 2 ranks" in one.problem
    assert "type scenario." in seven.problem
    assert two.config is not None


def test_what_a_case_expects_is_what_the_torch_that_is_here_does(monkeypatch):
    found = {}
    for torch in ("2.11.0+cu130", "2.12.0"):
        monkeypatch.setattr(configuration, "torch_version", lambda version=torch: version)
        (case,) = made(["buffer_inplace"])
        (raises,) = [c for c in case.config.scenario.claims if c.name == "sent_raises"]
        found[torch] = raises.expects.value
    assert found == {"2.11.0+cu130": "holds", "2.12.0": "refuted"}


def test_a_run_is_judged_by_what_its_own_torch_does(tmp_path):
    run = ended(tmp_path, "buffer_inplace", "r")
    found = {}
    for torch in ("2.11.0", "2.12.0"):
        run.environment.write_text(json.dumps({"packages": {"torch": torch}}))
        judged = runs.judge(run)
        verdict = json.loads(judged.verdict.to_json(judged.scenario))
        found[torch] = {item["claim"]: item["expects"] for item in verdict["findings"]}
    assert (found["2.11.0"]["sent_raises"], found["2.12.0"]["sent_raises"]) == ("holds", "refuted")


def test_a_broken_scenario_is_a_case_that_failed_and_stops_nobody(tmp_path, monkeypatch):
    (tmp_path / "torn.py").write_text("SCENARIO = None +\n")
    (tmp_path / "valueless.py").write_text(
        (scenarios.folders()[0] / "metric_average.py").read_text()
    )
    monkeypatch.setenv("CROSSRANK_SCENARIOS", str(tmp_path))
    by = {case.name: case for case in made()}
    assert by["torn"].state == by["valueless"].state == "failed"
    assert "SyntaxError" in by["torn"].problem
    assert "valueless.yaml" in by["valueless"].problem
    assert by["metric_average"].config is not None


def test_without_a_device_a_case_is_skipped():
    (case,) = made(["metric_average"], device="cuda")
    assert case.state == "skipped"
    assert "CUDA" in case.problem


def test_names_and_families_that_do_not_exist_are_refused_with_the_nearest():
    with pytest.raises(UsageError, match="nearest: metric_average"):
        chosen(["metric_averag"], "")
    with pytest.raises(UsageError, match="nearest: hangs"):
        chosen([], "hang")


def test_a_family_is_all_of_it_and_nothing_else():
    names = [name for name, _, _ in chosen([], "hangs")]
    assert names == [n for n in scenarios.names() if scenarios.load(n).family == "hangs"]


def case(name, gpus):
    return Case(name=name, gpus=gpus, scenario=None)


class Crowd:
    """Work that says how many ranks were under way at most, and in which order it began."""

    def __init__(self):
        self.lock = threading.Lock()
        self.now = self.most = 0
        self.begun = []
        self.gate = threading.Event()

    def work(self, one):
        with self.lock:
            self.begun.append(one.name)
            self.now += one.gpus
            self.most = max(self.most, self.now)
        self.gate.wait(60)
        with self.lock:
            self.now -= one.gpus
        return one.name


def test_no_more_ranks_at_a_time_than_the_budget_and_as_many_as_fit():
    crowd = Crowd()
    done = []
    pool = Pool(ranks=8)

    def tick():
        # Everything that fits is under way before the first of it may end.
        if len(pool.under_way) == 2:
            crowd.gate.set()

    pool.run([case(str(n), 4) for n in range(5)], crowd.work, lambda c, r: done.append(r), tick)
    assert sorted(done) == list("01234")
    assert crowd.most == 8


def test_a_case_larger_than_the_budget_runs_alone():
    crowd = Crowd()
    crowd.gate.set()
    done = []
    Pool(ranks=4).run(
        [case("large", 8), case("a", 2), case("b", 2)], crowd.work, lambda c, r: done.append(r)
    )
    assert sorted(done) == ["a", "b", "large"]
    assert crowd.most == 8


def test_heavy_cases_begin_first():
    light, heavy = made(["metric_average", "logsoftmax_drift"])
    assert light.weight < heavy.weight
    crowd = Crowd()
    crowd.gate.set()
    Pool(ranks=2).run([light, heavy], crowd.work, lambda c, r: None)
    assert crowd.begun == ["logsoftmax_drift", "metric_average"]


class Engine:
    """An engine whose ranks never end by themselves."""

    name = "endless"
    command = ()

    def __init__(self):
        self.stopped = 0

    def start(self, plan, layout, arms, batch):
        return self

    def poll(self, seconds):
        threading.Event().wait(0.001)
        return {0: None}

    def leaving(self):
        return False

    def signal(self, number):
        pass

    def stop(self):
        self.stopped += 1

    def close(self):
        pass


def test_an_interruption_ends_what_is_under_way_and_keeps_it(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    engine = Engine()
    pool = Pool(ranks=4)
    stoppable = Stoppable(engine, pool.stop)
    done = []

    def work(one):
        running = stoppable.start(None, None, (), 0)
        try:
            while True:
                running.poll(0.05)
        except Stopped:
            return "stopped"
        finally:
            running.stop()

    def tick():
        if len(pool.under_way) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run(
            [case(name, 2) for name in "abc"], work, lambda c, r: done.append((c.name, r)), tick
        )
    assert sorted(done) == [("a", "stopped"), ("b", "stopped")], "c must not begin any more"
    assert engine.stopped == 2
    with pytest.raises(Stopped):
        stoppable.start(None, None, (), 0)


def entry(name="s", gpus=4, *, state="as_expected", **more):
    return Entry(scenario=name, gpus=gpus, state=state, **more)


def finding(claim="c", outcome="holds", *, effect=None, floor=None, unit="u"):
    return {
        "claim": claim,
        "kind": "symptom",
        "expects": "holds",
        "outcome": outcome,
        "effect": effect,
        "floor": floor,
        "multiple": None,
        "unit": unit,
        "reason": f"why {outcome}",
    }


def of(*entries, name="x"):
    asked = {"gpus": [4], "seed": 0}
    environment = {"packages": {"torch": "2.13.0"}, "python": "3.11.7"}
    return Corpus(id=name, asked=asked, environment=environment, entries=entries)


def test_a_record_comes_back_as_it_was_and_another_version_is_refused(tmp_path):
    one = of(entry(findings=(finding(effect=float("inf"), floor=0.5),), ranks_differ=True))
    one.write(tmp_path)
    back = Corpus.read(tmp_path)
    assert back.entries[0].key == ("s", 4)
    assert back.entries[0].ranks_differ is True
    assert float(back.entries[0].findings[0]["effect"]) == float("inf")
    data = json.loads((tmp_path / "corpus.json").read_text())
    (tmp_path / "corpus.json").write_text(json.dumps(data | {"schema": 99}))
    with pytest.raises(RecordError, match="schema 99"):
        Corpus.read(tmp_path)


def test_latest_previous_a_date_and_a_path_are_found(tmp_path):
    with pytest.raises(UsageError, match="make corpus"):
        find("latest", tmp_path)
    for date in ("20260101T000000Z", "20260102T000000Z"):
        of().write(tmp_path / "corpus" / date)
    (tmp_path / "corpus" / "20260103T000000Z").mkdir()
    assert find("latest", tmp_path).name == "20260102T000000Z"
    assert find("previous", tmp_path).name == "20260101T000000Z"
    assert find("20260101T000000Z", tmp_path) == find("previous", tmp_path)
    assert find(str(tmp_path / "corpus" / "20260101T000000Z"), Path("no")).exists()
    with pytest.raises(UsageError, match="20260102T000000Z"):
        find("20260103T000000Z", tmp_path)
    with pytest.raises(UsageError, match=r"is no corpus: it holds no corpus\.json"):
        find(str(tmp_path), tmp_path)


def test_a_corpus_continued_with_another_torch_says_that_one_and_when_it_was_begun():
    (case,) = made(["metric_average"])
    before = {"packages": {"torch": "2.9.1"}, "python": "3.9.0", "started": "then"}
    found = session.gathered(before, case.place)
    assert (found["packages"]["torch"], found["started"]) == (torch_version(), "then")
    assert found["python"] != "3.9.0"
    assert session.gathered({}, case.place)["started"] > "2026"


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["as_expected", "skipped"], 0),
        (["as_expected", "inconclusive"], 11),
        (["failed", "as_expected"], 11),
        (["inconclusive", "unexpected", "failed"], 10),
        (["not_run", "as_expected"], 11),
    ],
)
def test_the_gravest_run_gives_the_exit_code(states, code):
    assert session.exit_code([entry(state=state) for state in states]) == code


def test_a_corpus_is_continued_with_what_it_was_begun_with(tmp_path, capsys):
    folder = tmp_path / "corpus" / "20260101T000000Z"
    (case,) = made(["metric_average"], seed=5)
    run = ended(folder, "metric_average", "r")
    point = point_key(case.config, case.place, torch_version())
    run.environment.write_text(json.dumps({"point": point}))
    there = entry("metric_average", 2, run="metric_average/r")
    missing = entry("loss_gap", 2, state="interrupted")
    asked = {
        "gpus": [2],
        "scenarios": ["metric_average", "loss_gap"],
        "family": "",
        "seed": 5,
        "device": "cpu",
        "launch": "auto",
    }
    dataclasses.replace(of(there, missing), asked=asked).write(folder)
    base = ["continue=latest", f"results={tmp_path}", "dry_run=true"]
    assert corpus.main(base) == 0
    told = capsys.readouterr().out
    assert "metric_average  gpus=2  is there" in told
    assert "loss_gap  gpus=2  to run" in told
    assert "1 to run" in told
    with pytest.raises(UsageError, match="seed=6 is not what"):
        corpus.main([*base, "seed=6"])

    run.environment.write_text(json.dumps({"point": "of another source"}))
    assert corpus.main(base) == 0
    assert "2 to run" in capsys.readouterr().out, "what has changed since is run again"


def test_a_corpus_of_which_nothing_can_run_is_refused(tmp_path):
    with pytest.raises(PrerequisiteError, match="at least 2 ranks"):
        corpus.main(["scenarios=metric_average", "gpus=1", f"results={tmp_path}"])
    assert not (tmp_path / "corpus").exists()


def test_what_people_do_wrong_prints_no_traceback(capsys):
    assert ending.answered(lambda: corpus.main(["gpu=4"])) == 2
    assert "nearest: gpus" in capsys.readouterr().err
    assert ending.answered(lambda: corpus.main(["--help"])) == 0
    assert "continue=" in capsys.readouterr().out


def compared(a, b):
    return comparing.compare(comparing.side(of(*a)), comparing.side(of(*b)))


def test_equal_corpora_do_not_differ():
    one = [entry(findings=(finding(effect=1.0, floor=0.1),))]
    found = compared(one, one)
    assert (found.compared, found.changes, found.moves) == (1, [], [])


def test_findings_that_changed_appeared_or_vanished_are_told():
    before = [entry(findings=(finding("kept"), finding("turned"), finding("gone")))]
    after = [entry(findings=(finding("kept"), finding("turned", "refuted"), finding("new")))]
    found = compared(before, after)
    assert {(c.claim, c.before, c.after) for c in found.changes} == {
        ("turned", "holds", "refuted"),
        ("gone", "holds", ""),
        ("new", "", "holds"),
    }
    assert found.compared == 2


def test_a_run_that_failed_or_is_missing_is_told():
    found = compared(
        [entry("a", findings=(finding(),)), entry("b")],
        [entry("a", state="failed", problem="rank 1 died")],
    )
    runs = {(c.scenario, c.before, c.after) for c in found.changes if not c.claim}
    assert runs == {("a", "ran", "failed"), ("b", "ran", "")}


@pytest.mark.parametrize("state", [None, "not_run", "interrupted"])
def test_a_run_that_one_side_lacks_is_told_once_and_not_claim_by_claim(tmp_path, capsys, state):
    shared = entry("shared", findings=(finding("turned"),))
    alone = entry("alone", findings=tuple(finding(f"claim_{n}") for n in range(9)))
    there = [] if state is None else [entry("alone", state=state)]
    turned = entry("shared", findings=(finding("turned", "refuted"),))
    found = compared([shared, alone], [turned, *there])
    assert [(c.scenario, c.claim, c.after) for c in found.changes] == [
        ("alone", "", ""),
        ("shared", "turned", "refuted"),
    ]
    of(shared, alone, name="first").write(tmp_path / "corpus" / "1")
    of(turned, *there, name="second").write(tmp_path / "corpus" / "2")
    for words in ([], ["a=latest", "b=previous"]):
        assert diff.main([f"results={tmp_path}", *words]) == 10
        told = capsys.readouterr().out
        assert told.count("alone") == 1
        assert "only in first: alone\n" in told
        assert "1 finding compared: 1 changed; in one of them only: 1 run; 0" in told
        assert "ended otherwise" not in told


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        ((1.0, 0.1), (1.3, 0.1), False),
        ((1.0, 0.1), (1.5, 0.1), True),
        ((1.0, 0.01), (1.3, 0.1), False),
        ((1.0, None), (1.05, None), False),
        ((1.0, None), (1.2, None), True),
        ((0.0, 0.0), (0.0, 0.0), False),
        ((0.0, 0.0), (1e-9, 0.0), True),
        ((None, None), (1.0, None), False),
        ((float("nan"), 0.1), (1.0, 0.1), False),
    ],
)
def test_effects_move_by_multiples_of_their_floor(before, after, moved):
    sides = [
        [entry(findings=(finding(effect=effect, floor=floor),))]
        for effect, floor in (before, after)
    ]
    assert bool(compared(*sides).moves) is moved
    assert bool(compared(*sides[::-1]).moves) is moved


def test_numbers_of_ranks_are_compared_where_each_side_has_one(tmp_path):
    whole = of(
        entry(gpus=2, findings=(finding(outcome="holds"),)),
        entry(gpus=4, findings=(finding(outcome="refuted"),)),
    )
    found = comparing.compare(comparing.side(whole, 2), comparing.side(whole, 4))
    assert [(c.gpus, c.before, c.after) for c in found.changes] == [("2, 4", "holds", "refuted")]
    with pytest.raises(UsageError, match="runs of 2, 4"):
        comparing.side(whole, 8)


def test_the_command_says_what_differs_and_where_both_ran(tmp_path, capsys):
    of(entry(findings=(finding(),)), name="one").write(tmp_path / "corpus" / "1")
    two = of(entry(findings=(finding(outcome="refuted"),)), name="two")
    facts = {"packages": {"torch": "2.14.0"}, "python": "3.12.1"}
    dataclasses.replace(two, environment=facts).write(tmp_path / "corpus" / "2")
    assert diff.main([f"results={tmp_path}"]) == 10
    told = capsys.readouterr().out
    for word in ("2.13.0", "2.14.0", "3.12.1", "holds", "refuted", "1 changed"):
        assert word in told, word
    assert diff.main([f"results={tmp_path}", "a=latest"]) == 0
    assert diff.main([f"results={tmp_path}", "--json"]) == 10
    told = capsys.readouterr().out
    assert json.loads(told[told.index("{") :])["changes"][0]["after"] == "refuted"


def test_whether_weights_part_comes_from_the_records(tmp_path):
    from tests.report_runs import record as write

    def run(folder, parted):
        def metrics(arm, rank, step):
            off = rank if parted and arm == "bypassed" and step else 0
            return {"weights.digest": f"{step}.{off}", "loss": 1.0}

        return write(folder, {"one_process": 1, "bypassed": 2, "wrapper": 2}, 3, metrics)

    scenario = scenarios.load("ddp_forward_bypassed")
    assert [arm.name for arm in scenario.arms if arm.role is Role.FAULTY] == ["bypassed"]
    assert record.ranks_differ(run(tmp_path / "a", True), scenario) is True
    assert record.ranks_differ(run(tmp_path / "b", False), scenario) is False
    assert record.ranks_differ(ended(tmp_path, "gradient_self_test", "r"), scenario) is None
