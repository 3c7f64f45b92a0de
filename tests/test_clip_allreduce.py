"""Each judge of clip_allreduce can say each of its findings, on altered records of a real run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import record
from harness.floor import PERMUTATIONS
from harness.parameters import violations
from harness.plan import Layout, Plan
from harness.record import Row, Stream
from harness.scenario import Finding, Outcome
from harness.tables import Tables
from harness.verdict import Conclusion, decide
from scenarios.clip_allreduce import SCENARIO

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = {claim.name: claim for claim in SCENARIO.claims}
Change = Callable[[Row], Mapping[str, record.Value] | None]


def reproduce(results: Path, *words: str) -> Layout:
    command = [sys.executable, "-m", "launch", "scenario=clip_allreduce", "device=cpu"]
    command += [f"results={results}", "quiet=true", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 10, 11), done.stdout + done.stderr
    (verdict,) = results.rglob("verdict.json")
    return Layout(verdict.parent)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return reproduce(tmp_path_factory.mktemp("clip_allreduce"), "gpus=2")


@pytest.fixture(scope="module")
def recorded(layout: Layout) -> Mapping[str, Mapping[int, Stream]]:
    plan = Plan.read(layout.plan)
    found = {
        arm.name: {rank: record.read(layout, arm.name, rank) for rank in range(arm.ranks)}
        for arm in plan.arms
    }
    return {arm: {r: s for r, s in ranks.items() if s} for arm, ranks in found.items()}


class Run:
    """A copy of a real run's records that a test may alter."""

    def __init__(
        self, plan: Plan, recorded: Mapping[str, Mapping[int, Stream]], scratch: Path
    ) -> None:
        self.plan, self.scratch = plan, scratch
        self.streams = {arm: dict(ranks) for arm, ranks in recorded.items()}

    def finding(self, claim: str) -> Finding:
        alone = dataclasses.replace(SCENARIO, claims=[CLAIMS[claim]], headline=lambda found: "")
        verdict = decide(alone, "clip_allreduce", Tables(self.plan, self.streams))
        assert not verdict.judge_errors, verdict.judge_errors
        return verdict.findings[claim]

    def says(self, claim: str) -> str:
        return self.finding(claim).outcome.value

    def headline(self) -> str:
        return decide(SCENARIO, "clip_allreduce", Tables(self.plan, self.streams)).headline

    def copy(self, source: str, to: str) -> None:
        """Let the arm `to` have run like `source`."""
        self.streams[to] = dict(self.streams[source])

    def copies(self, **sources: str) -> None:
        for to, source in sources.items():
            self.copy(source, to)

    def lose(self, arm: str, rank: int = 0) -> None:
        del self.streams[arm][rank]

    def put(self, arm: str, change: Change, rank: int | None = None) -> None:
        """Put what `change` returns over a row's metrics; None leaves the row alone."""
        for at, stream in self.streams[arm].items():
            if rank in (None, at):
                rows = [
                    dataclasses.replace(row, metrics={**row.metrics, **(change(row) or {})})
                    for row in stream.rows
                ]
                self.streams[arm][at] = dataclasses.replace(stream, rows=rows)

    def edit(self, arm: str, phase: str, change: Callable[[Any], Any], name: str = "grad") -> None:
        """Replace the snapshot that every rank took in `phase` of step and repeat 0."""
        for rank, stream in self.streams[arm].items():
            values = np.fromfile(stream.tensors)
            for row in stream.rows:
                first = row.repeat == 0 and (row.step == 0 or phase)
                if first and row.phase == phase and name in row.snapshots:
                    offset, count = row.snapshots[name]
                    values[offset : offset + count] = change(values[offset : offset + count])
            path = self.scratch / f"{arm}-{phase}-{rank}.f64"
            values.tofile(path)
            self.streams[arm][rank] = dataclasses.replace(stream, tensors=path)

    def gap(self, arm: str, to: str, step: int, phase: str, floors: float) -> None:
        """Put every rank's gradient at a distance of so many floors from the arm `to`."""
        tables = Tables(self.plan, self.streams)
        base = tables.snapshot(to, "grad", step=step, phase=phase)
        floor = max(tables.permuted(to, "grad", step=step, phase=phase))
        away = np.random.default_rng(1).standard_normal(base.size)
        away *= floors * floor * np.linalg.norm(base) / np.linalg.norm(away)
        self.edit(arm, phase, lambda values: base + away)


@pytest.fixture
def run(layout: Layout, recorded: Mapping[str, Mapping[int, Stream]], tmp_path: Path) -> Run:
    return Run(Plan.read(layout.plan), recorded, tmp_path)


def at(phase: str, **metrics: record.Value) -> Change:
    return lambda row: metrics if row.phase == phase else None


def every(**metrics: record.Value) -> Change:
    return lambda row: {name: value for name, value in metrics.items() if name in row.metrics}


def derived(source: str, change: Callable[[float], float], to: str = "norm") -> Change:
    """Put a number that follows from another one of the same row."""

    def metrics(row: Row) -> Mapping[str, record.Value] | None:
        value = row.metrics.get(source)
        return {to: change(value)} if isinstance(value, int | float) else None

    return metrics


def test_two_ranks_find_what_is_expected(layout: Layout) -> None:
    verdict = json.loads(layout.verdict.read_text("utf-8"))
    unexpected = [f for f in verdict["findings"] if f["outcome"] != f["expects"]]
    assert unexpected == []
    assert verdict["failures"] == []


def test_four_ranks_find_the_same(tmp_path: Path) -> None:
    layout = reproduce(tmp_path, "gpus=4", "seed=11")
    verdict = json.loads(layout.verdict.read_text("utf-8"))
    outcomes = {f["claim"]: f["outcome"] for f in verdict["findings"]}
    assert outcomes == {name: claim.expects.value for name, claim in CLAIMS.items()}
    root = {f["claim"]: f for f in verdict["findings"]}["shard_norm_is_sqrt_n_smaller"]
    assert root["evidence"]["mean_ratio"] == pytest.approx(2.0, rel=1e-12)


# What each claim's finding becomes when the records are those of another world.
Case = tuple[str, str, Callable[[Run], None]]
CASES: list[Case] = [
    ("ddp_reduces_the_norm", "holds", lambda r: r.copy("ddp_reduced", "ddp")),
    ("ddp_reduces_the_norm", "unknown", lambda r: r.copy("ddp", "ddp_reduced")),
    ("ddp_reduces_the_norm", "unknown", lambda r: r.put("ddp", every(sync_collectives=0))),
    ("ddp_reduces_the_norm", "unknown", lambda r: r.put("ddp", at("L2", clip_collectives=1))),
    ("ddp_reduces_the_norm", "unknown", lambda r: r.put("ddp_reduced", at("inf", clip_bytes=4))),
    (
        "value_clip_is_silent",
        "refuted",
        lambda r: r.put("hsdp", at("value", clip_collectives=1), 1),
    ),
    ("value_clip_is_silent", "unknown", lambda r: r.copy("ddp", "ddp_reduced")),
    ("value_clip_saves_traffic", "holds", lambda r: r.put("ddp", at("L1", clip_collectives=1))),
    ("value_clip_saves_traffic", "unknown", lambda r: r.lose("one_process")),
    (
        "sharded_norm_is_one_all_reduce",
        "refuted",
        lambda r: r.put("fsdp1", at("L1", clip_ops="all_reduce,all_reduce"), 1),
    ),
    ("sharded_norm_is_one_all_reduce", "refuted", lambda r: r.copy("fsdp1_shards", "fsdp1")),
    ("sharded_norm_is_one_all_reduce", "unknown", lambda r: r.lose("fsdp2_part", 1)),
    (
        "traffic_grows_with_the_model",
        "holds",
        lambda r: r.put("timed_fsdp2", at("wide loop", clip_bytes=999)),
    ),
    (
        "traffic_grows_with_the_model",
        "holds",
        lambda r: r.put("timed_fsdp1", at("wide foreach", clip_bytes=999), 1),
    ),
    (
        "traffic_grows_with_the_model",
        "unknown",
        lambda r: r.put("timed_ddp", at("wide loop", sync_bytes=5), 1),
    ),
    (
        "traffic_grows_with_the_model",
        "unknown",
        lambda r: r.put("timed_ddp", every(sync_bytes=5)),
    ),
    (
        "clip_takes_as_long_as_backward",
        "holds",
        lambda r: r.put("timed_ddp", every(backward_s=0.001, clip_s=0.009)),
    ),
    (
        "clip_takes_as_long_as_backward",
        "unknown",
        lambda r: r.put("timed_ddp", every(backward_s=0.001, clip_s=0.009), 1),
    ),
    (
        "clip_takes_as_long_as_backward",
        "unknown",
        lambda r: r.put("timed_ddp", lambda row: {"clip_s": 1.0} if row.step % 2 else None),
    ),
    ("distributed_clip_is_right", "refuted", lambda r: r.copy("fsdp2_shards", "fsdp2")),
    ("distributed_clip_is_right", "refuted", lambda r: r.copy("fsdp1_shards", "fsdp1_part")),
    (
        "distributed_clip_is_right",
        "unknown",
        lambda r: r.gap("hsdp", "one_process", 3, "value", 20.0),
    ),
    (
        "distributed_clip_is_right",
        "unknown",
        lambda r: r.put("one_process", at("inf", norm=0.01)),
    ),
    (
        "local_norm_is_the_models",
        "holds",
        lambda r: r.copies(fsdp1_shards="fsdp1", fsdp2_shards="fsdp2"),
    ),
    ("local_norm_is_the_models", "unknown", lambda r: r.copy("fsdp2", "fsdp2_shards")),
    (
        "shard_norm_is_sqrt_n_smaller",
        "refuted",
        lambda r: r.put("fsdp2_shards", derived("norm", lambda norm: 2 * norm)),
    ),
    (
        "shard_norm_is_sqrt_n_smaller",
        "unknown",
        lambda r: r.put("fsdp2_shards", derived("norm", lambda norm: (1 + 1e-14) * norm)),
    ),
    ("one_call_takes_both_kinds", "holds", lambda r: r.put("fsdp2_part", every(refusal=""))),
    ("one_call_takes_both_kinds", "unknown", lambda r: r.put("fsdp2_part", every(refusal=""), 1)),
    (
        "returned_norm_can_be_logged",
        "holds",
        lambda r: r.put("fsdp2", derived("full_norm", lambda norm: norm)),
    ),
    (
        "returned_norm_can_be_logged",
        "unknown",
        lambda r: r.put("fsdp2", derived("full_norm", lambda norm: (1 + 1e-14) * norm)),
    ),
    ("returned_norm_can_be_logged", "unknown", lambda r: r.put("fsdp2", at("inf", skipped="yes"))),
    (
        "lone_call_hangs_ddp",
        "holds",
        lambda r: r.put("rank0", derived("collectives", lambda count: count + 1, "collectives"), 0),
    ),
    ("lone_call_hangs_ddp", "unknown", lambda r: r.put("rank0", every(collectives=0))),
    ("lone_call_hangs_ddp", "unknown", lambda r: r.copy("after", "rank0")),
    ("lone_call_is_harmless_under_ddp", "holds", lambda r: r.copy("after", "rank0")),
    ("lone_call_is_harmless_under_ddp", "unknown", lambda r: r.copy("rank0", "after")),
    (
        "lone_call_is_harmless_under_ddp",
        "unknown",
        lambda r: r.put("trained_alone", every(norm=0.05)),
    ),
    ("lone_call_hangs_when_sharded", "unknown", lambda r: r.put("alone", every(seconds=0.01))),
    ("lone_call_hangs_when_sharded", "refuted", lambda r: r.put("alone", every(raised=""))),
    ("lone_call_hangs_when_sharded", "unknown", lambda r: r.put("alone", at("fsdp1", raised=""))),
    ("lone_call_hangs_when_sharded", "unknown", lambda r: r.put("alone", at("fsdp1", called=True))),
    ("lone_call_hangs_when_sharded", "unknown", lambda r: r.lose("fsdp2")),
    ("inf_norm_works_where_l2_does", "holds", lambda r: r.put("alone", at("empty", raised=""))),
    (
        "inf_norm_works_where_l2_does",
        "unknown",
        lambda r: r.put("alone", at("empty L2", raised="no"), 1),
    ),
    (
        "inf_norm_works_where_l2_does",
        "unknown",
        lambda r: r.put("alone", at("empty", raised=""), 1),
    ),
    ("by_hand_first", "holds", lambda r: r.copy("manual_after", "manual_before")),
    ("by_hand_first", "unknown", lambda r: r.copy("manual_before", "same_rows")),
    ("in_hook", "holds", lambda r: r.copy("after", "hook_before")),
    ("in_hook", "unknown", lambda r: r.edit("hook_before", "", lambda values: 100 * values)),
    ("in_no_sync", "holds", lambda r: r.copy("no_sync_after", "no_sync_before")),
    ("without_unscale", "holds", lambda r: r.copy("unscaled", "scaled")),
    ("without_unscale", "unknown", lambda r: r.put("trained_alone", every(norm=0.05))),
    ("averaging_first_is_right", "refuted", lambda r: r.copy("no_sync_before", "no_sync_after")),
    (
        "averaging_first_is_right",
        "unknown",
        lambda r: r.gap("unscaled", "trained_alone", 0, "", 20.0),
    ),
    (
        "report_arithmetic",
        "refuted",
        lambda r: r.edit("report", "L2", lambda values: values * (1 + 1e-9), "clipped"),
    ),
    (
        "norm_choice_changes_direction",
        "holds",
        lambda r: r.edit("report", "L1", lambda values: np.minimum(values, 0.1), "clipped"),
    ),
    (
        "l2_cuts_a_spike_harder",
        "holds",
        lambda r: r.put("report", lambda row: {"spike": 1e5} if row.phase == "L1" else None),
    ),
    ("below_the_bound_is_untouched", "holds", lambda r: r.put("report", at("tiny", left=5e-7))),
]
NEEDS = {
    "ddp_reduces_the_norm": "ddp",
    "value_clip_is_silent": "fsdp1_part",
    "value_clip_saves_traffic": "ddp",
    "sharded_norm_is_one_all_reduce": "hsdp",
    "traffic_grows_with_the_model": "timed_fsdp1",
    "clip_takes_as_long_as_backward": "timed_ddp",
    "distributed_clip_is_right": "one_process_fp32",
    "local_norm_is_the_models": "fsdp1_shards",
    "shard_norm_is_sqrt_n_smaller": "fsdp2_shards",
    "one_call_takes_both_kinds": "fsdp2_part",
    "returned_norm_can_be_logged": "one_process",
    "lone_call_hangs_ddp": "rank0",
    "lone_call_is_harmless_under_ddp": "rank0",
    "lone_call_hangs_when_sharded": "alone",
    "inf_norm_works_where_l2_does": "alone",
    "by_hand_first": "manual_before",
    "in_hook": "hook_before",
    "in_no_sync": "no_sync_before",
    "without_unscale": "scaled",
    "averaging_first_is_right": "manual_after",
    "report_arithmetic": "report",
    "norm_choice_changes_direction": "report",
    "l2_cuts_a_spike_harder": "report",
    "below_the_bound_is_untouched": "report",
}


@pytest.mark.parametrize(
    ("claim", "outcome", "alter"), CASES, ids=[f"{c}-{o}-{n}" for n, (c, o, _) in enumerate(CASES)]
)
def test_the_finding_follows_the_records(
    run: Run, claim: str, outcome: str, alter: Callable[[Run], None]
) -> None:
    alter(run)
    assert run.says(claim) == outcome


@pytest.mark.parametrize("claim", CLAIMS)
def test_missing_records_are_no_agreement(run: Run, claim: str) -> None:
    run.lose(NEEDS[claim])
    assert run.says(claim) == "unknown"


def test_every_claim_was_seen_with_every_outcome() -> None:
    seen = {(name, claim.expects.value) for name, claim in CLAIMS.items()}
    seen |= {(name, "unknown") for name in NEEDS} | {(name, outcome) for name, outcome, _ in CASES}
    assert seen == {(name, outcome.value) for name in CLAIMS for outcome in Outcome}


@pytest.mark.parametrize(
    ("floors", "outcome"), [(2.0, "holds"), (20.0, "unknown"), (500.0, "refuted")]
)
@pytest.mark.parametrize(
    ("claim", "arm"),
    [
        ("by_hand_first", "manual_before"),
        ("in_hook", "hook_before"),
        ("in_no_sync", "no_sync_before"),
        ("without_unscale", "scaled"),
    ],
)
def test_an_effect_counts_by_its_multiple_of_the_floor(
    run: Run, claim: str, arm: str, floors: float, outcome: str
) -> None:
    run.gap(arm, "trained_alone", 0, "", floors)
    finding = run.finding(claim)
    assert finding.outcome.value == outcome
    assert finding.multiple == pytest.approx(floors, rel=0.05)


def test_weights_that_never_move_say_nothing_about_a_lone_call(tmp_path: Path) -> None:
    layout = reproduce(tmp_path, "scenario.lr=0", "scenario.permutations=1")
    found = {f["claim"]: f for f in json.loads(layout.verdict.read_text("utf-8"))["findings"]}
    assert found["lone_call_is_harmless_under_ddp"]["outcome"] == "unknown"
    assert "scenario.lr=0" in found["lone_call_is_harmless_under_ddp"]["reason"]
    assert "scenario.permutations=1" in found["by_hand_first"]["reason"]


def test_norms_that_were_left_out_are_named(run: Run) -> None:
    run.put("hsdp", at("inf", skipped="a rank holds an empty shard"))
    finding = run.finding("sharded_norm_is_one_all_reduce")
    assert "inf left out in hsdp" in finding.reason


def test_a_value_clip_that_clips_nothing_is_not_said_to_turn_the_gradient(run: Run) -> None:
    assert "turns" in run.finding("value_clip_saves_traffic").reason
    tables = Tables(run.plan, run.streams)
    same = tables.snapshot("one_process", "grad", step=1, phase="L2")
    run.edit("one_process", "value", lambda values: 2 * same)
    assert "turns" not in run.finding("value_clip_saves_traffic").reason


def test_too_few_permutations_decide_nothing(run: Run) -> None:
    arms = [
        dataclasses.replace(arm, repeats=min(arm.repeats, PERMUTATIONS)) for arm in run.plan.arms
    ]
    run.plan = dataclasses.replace(run.plan, arms=tuple(arms))
    assert run.says("by_hand_first") == "unknown"
    assert run.says("distributed_clip_is_right") == "unknown"


def test_a_gradient_that_is_not_finite_is_a_fault(run: Run) -> None:
    run.edit("after", "", lambda values: np.full_like(values, np.nan))
    assert run.says("averaging_first_is_right") == "refuted"


def test_few_timed_steps_decide_nothing(run: Run) -> None:
    for rank, stream in run.streams["timed_ddp"].items():
        rows = [row for row in stream.rows if row.step < 9]
        run.streams["timed_ddp"][rank] = dataclasses.replace(stream, rows=rows)
    assert run.says("clip_takes_as_long_as_backward") == "unknown"
    assert run.says("traffic_grows_with_the_model") == "refuted"


def test_the_headline_says_what_this_run_found(run: Run) -> None:
    told = run.headline()
    assert "sends nothing" in told
    assert "clipping before the average is the failure" in told
    run.copy("ddp_reduced", "ddp")
    run.copy("manual_after", "manual_before")
    told = run.headline()
    assert "up to 1 collectives" in told
    assert "before or after the average is the same" in told
    run.streams = {arm: {} for arm in run.streams}
    assert "decides neither" in run.headline()


def test_a_run_against_expectation_is_not_as_expected(run: Run) -> None:
    run.copy("ddp_reduced", "ddp")
    verdict = decide(SCENARIO, "clip_allreduce", Tables(run.plan, run.streams))
    assert verdict.conclusion is Conclusion.UNEXPECTED


def test_parameters_out_of_range_are_named(run: Run) -> None:
    assert violations(SCENARIO.params, run.plan.params) == []
    wrong = {**run.plan.params, "bound": 0.0, "timed_steps": 0, "width": 1}
    assert len(violations(SCENARIO.params, wrong)) == 3


def test_the_module_needs_no_torch_to_list_and_judge() -> None:
    code = "import sys, scenarios.clip_allreduce; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
