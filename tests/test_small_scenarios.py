"""Every scenario of one file: its verdict, and what becomes of it when its records are altered."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import scenarios
from harness import record
from harness.plan import Layout, Plan
from harness.record import Stream
from harness.scenario import Kind, Outcome, Role
from harness.tables import Tables
from harness.verdict import Conclusion, Verdict, decide
from launch.newest import own
from tests.launching import ROOT, environment, launch, verdict_of

HERE = scenarios.folders()[0]
SMALL = [name for name in own() if not (HERE / f"_{name}").is_dir()]
LONGEST = 150
"""Lines of a scenario that is to be taken in at a glance."""
Streams = dict[str, dict[int, Stream]]


class Case:
    """One real run of a scenario, of which tests judge altered copies."""

    def __init__(self, entry: dict[str, Any], layout: Layout | None):
        self.name = str(entry["scenario"])
        self.scenario = scenarios.load(self.name)
        assert layout is not None, entry["problem"]
        self.layout = layout
        self.verdict = verdict_of(layout)
        self.plan = Plan.read(layout.plan)

    def __repr__(self) -> str:
        return self.name

    def streams(self) -> Streams:
        found: Streams = {}
        for arm in self.plan.arms:
            read = {rank: record.read(self.layout, arm.name, rank) for rank in range(arm.ranks)}
            found[arm.name] = {rank: stream for rank, stream in read.items() if stream}
        return found

    def judged(self, streams: Streams) -> Verdict:
        verdict = decide(self.scenario, self.name, Tables(self.plan, streams))
        assert not verdict.judge_errors, verdict.judge_errors
        return verdict

    def arms(self, role: Role) -> list[str]:
        return [arm.name for arm in self.scenario.arms if arm.role is role]


def corpus(results: Path, names: list[str], *words: str) -> dict[str, tuple[Any, Layout | None]]:
    """Run many scenarios side by side; return what corpus.json says of each, and its run."""
    command = [sys.executable, "-m", "launch.corpus", f"results={results}", "device=cpu", *words]
    ended = subprocess.run(
        [*command, f"scenarios={','.join(names)}", "quiet=true"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (results / "corpus").is_dir(), (ended.returncode, ended.stdout, ended.stderr)
    (folder,) = (results / "corpus").iterdir()
    entries = json.loads((folder / "corpus.json").read_text())["entries"]
    assert {entry["scenario"] for entry in entries} == set(names), ended.stderr
    return {
        entry["scenario"]: (entry, Layout(folder / entry["run"]) if entry["run"] else None)
        for entry in entries
    }


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    chosen = {item.callspec.params["case"] for item in request.session.items if _needs_case(item)}
    return corpus(tmp_path_factory.mktemp("corpus"), sorted(chosen), "gpus=2")


def _needs_case(item: pytest.Item) -> bool:
    # Others have cases of their own.
    here = item.path == Path(__file__)
    return here and "case" in getattr(getattr(item, "callspec", None), "params", {})


@pytest.fixture(scope="module", params=SMALL)
def case(request, runs) -> Case:
    return Case(*runs[request.param])


def as_ranks(streams: Streams, arm: str, of: str) -> dict[int, Stream]:
    """Return the records of one arm for the ranks of another; one process stands for all."""
    return {rank: streams[of].get(rank, streams[of][0]) for rank in streams[arm]}


def assert_nobody_passes_without(case: Case, streams: Streams, what: str) -> None:
    """A claim that does not read what is gone says what it said; all others say `unknown`."""
    before, after = case.judged(case.streams()).findings, case.judged(streams).findings
    for name, finding in after.items():
        kept = (finding.outcome, finding.effect) == (before[name].outcome, before[name].effect)
        assert kept or finding.outcome is Outcome.UNKNOWN, f"{what}: {name} {finding}"
    assert Outcome.UNKNOWN in {finding.outcome for finding in after.values()}, f"{what} is not read"


def test_it_is_short():
    long = {name: len((HERE / f"{name}.py").read_text().splitlines()) for name in SMALL}
    assert {name: lines for name, lines in long.items() if lines > LONGEST} == {}


def test_the_verdict_is_as_expected(case):
    assert (case.verdict["conclusion"], case.verdict["failures"]) == ("as_expected", [])


def test_the_headline_is_decided(case):
    assert "undecided" not in case.verdict["headline"]


def test_nothing_passes_without_a_rank(case):
    for arm in case.plan.arms:
        for rank in range(arm.ranks):
            streams = case.streams()
            del streams[arm.name][rank]
            assert_nobody_passes_without(case, streams, f"rank {rank} of {arm.name}")


def test_nothing_passes_without_the_end_of_a_rank(case):
    for arm in case.plan.arms:
        for rank in range(arm.ranks):
            streams = case.streams()
            streams[arm.name][rank] = dataclasses.replace(streams[arm.name][rank], end=None)
            assert_nobody_passes_without(case, streams, f"the end of rank {rank} of {arm.name}")


def test_nothing_is_rounding_without_the_permuted_repeats(case):
    for arm in case.plan.arms:
        if arm.repeats == 1:
            continue
        streams = case.streams()
        stream = streams[arm.name][0]
        rows = [row for row in stream.rows if row.repeat == 0]
        streams[arm.name][0] = dataclasses.replace(stream, rows=rows)
        assert_nobody_passes_without(case, streams, f"repeats of {arm.name}")


def test_a_symptom_is_gone_where_the_faulty_arm_runs_like_the_reference(case):
    reference = case.arms(Role.REFERENCE)[0]
    for faulty in case.arms(Role.FAULTY):
        streams = case.streams()
        streams[faulty] = as_ranks(streams, faulty, reference)
        assert case.judged(streams).conclusion is not Conclusion.AS_EXPECTED, faulty


def test_a_remedy_fails_where_the_fixed_arm_runs_like_the_faulty_one(case):
    for fixed in case.arms(Role.FIXED):
        failed = set()
        for faulty in case.arms(Role.FAULTY):
            streams = case.streams()
            streams[fixed] = as_ranks(streams, fixed, faulty)
            found = case.judged(streams).findings
            failed |= {
                claim.name
                for claim in case.scenario.claims
                if found[claim.name].outcome is not claim.expects and claim.kind is not Kind.SYMPTOM
            }
        assert failed, fixed


def test_swapped_arms_are_noticed(case):
    for faulty in case.arms(Role.FAULTY):
        for fixed in case.arms(Role.FIXED):
            streams = case.streams()
            streams[faulty], streams[fixed] = streams[fixed], streams[faulty]
            conclusion = case.judged(streams).conclusion
            assert conclusion is not Conclusion.AS_EXPECTED, f"{faulty} and {fixed}"


@pytest.mark.parametrize(
    ("name", "value", "claims"),
    [
        ("stop_decision_local", "target=100", {"others_wait", "barrier_helps"}),
        (
            "rank_dependent_warmup",
            "base=1",
            {"lengths_differ", "weights_part", "gradients_show_it"},
        ),
        ("ddp_forward_bypassed", "permutations=19", {"call_the_wrapper", "average_by_hand"}),
    ],
)
def test_a_value_that_voids_a_claim_leaves_it_open(name, value, claims, tmp_path):
    given = (f"scenario={name}", f"scenario.{value}", "gpus=2", "seed=1", "device=cpu")
    run = launch(*given, results=tmp_path)
    found = {finding["claim"]: finding["outcome"] for finding in run.verdict["findings"]}

    assert run.code == 11, run.out
    assert {claim for claim, outcome in found.items() if outcome == "unknown"} == claims


MORE = (3, 4, 8)
"""Numbers of ranks that scenarios take turns in; all of each is `CROSSRANK_ALL_RANKS=1`."""
TURNS = {
    ranks: [
        name
        for turn, name in enumerate(SMALL)
        if os.environ.get("CROSSRANK_ALL_RANKS") or turn % len(MORE) == place
    ]
    for place, ranks in enumerate(MORE)
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MORE)
def test_more_ranks_find_the_same(ranks, tmp_path):
    found = corpus(tmp_path, TURNS[ranks], f"gpus={ranks}", "seed=1")
    others = {
        name: (entry["state"], entry["problem"], entry["headline"])
        for name, (entry, _) in found.items()
        # Some say which numbers of ranks they can be shared by.
        if entry["state"] not in ("as_expected", "skipped")
    }
    assert others == {}
