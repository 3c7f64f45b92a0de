"""Each judge of logsoftmax_drift can say each of its findings, on altered records of a real run."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from harness import record
from harness.parameters import violations
from harness.plan import Layout, Plan
from harness.record import Row, Stream
from harness.scenario import Finding, Outcome, unknown
from harness.tables import Tables
from harness.verdict import decide
from scenarios import logsoftmax_drift as drift

ROOT = Path(__file__).resolve().parent.parent
WORLD, STEPS = 2, 4
EXPECTED = {claim.name: claim.expects for claim in drift.SCENARIO.claims}
Streams = dict[str, dict[int, Stream]]


def reproduce(results: Path, *words: str) -> Layout:
    command = [sys.executable, "-m", "launch", "scenario=logsoftmax_drift", f"gpus={WORLD}"]
    command += [f"results={results}", "device=cpu", "quiet=true", f"scenario.steps={STEPS}", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 10, 11), done.stdout + done.stderr
    (verdict,) = results.rglob("verdict.json")
    return Layout(verdict.parent)


class Run:
    """A real run, of which tests take altered copies."""

    def __init__(self, layout: Layout, scratch: Path) -> None:
        self.layout, self.scratch = layout, scratch
        self.plan = Plan.read(layout.plan)

    def streams(self) -> Streams:
        found: Streams = {}
        for arm in self.plan.arms:
            found[arm.name] = {}
            for rank in range(arm.ranks):
                stream = record.read(self.layout, arm.name, rank)
                assert stream is not None
                found[arm.name][rank] = stream
        return found

    def judged(self, streams: Streams, plan: Plan | None = None) -> Mapping[str, Finding]:
        verdict = decide(drift.SCENARIO, "logsoftmax_drift", Tables(plan or self.plan, streams))
        assert not verdict.judge_errors, verdict.judge_errors
        return verdict.findings

    def finding(self, claim: str, streams: Streams) -> Finding:
        (only,) = (item for item in drift.SCENARIO.claims if item.name == claim)
        scenario = dataclasses.replace(drift.SCENARIO, claims=(only,), headline=lambda found: "")
        verdict = decide(scenario, "logsoftmax_drift", Tables(self.plan, streams))
        assert not verdict.judge_errors, verdict.judge_errors
        return verdict.findings[claim]

    def tensors_of(self, streams: Streams, arm: str, other: str) -> None:
        """Let an arm have trained like another one, and keep what it logged."""
        for rank, stream in streams[arm].items():
            source = streams[other][rank]
            places = {(row.repeat, row.step, row.phase, *row.snapshots): row for row in source.rows}
            rows = []
            for row in stream.rows:
                like = places.get((row.repeat, row.step, row.phase, *row.snapshots))
                rows.append(dataclasses.replace(row, snapshots=like.snapshots) if like else row)
            streams[arm][rank] = dataclasses.replace(stream, rows=rows, tensors=source.tensors)

    def scaled(self, streams: Streams, arm: str, to: str, name: str, gap: float) -> None:
        """Move every snapshot of `name` to the relative distance `gap` from that of `to`."""
        for rank, stream in streams[arm].items():
            values = np.fromfile(stream.tensors)
            for row in stream.rows:
                if name in row.snapshots and row.repeat == 0:
                    offset, count = row.snapshots[name]
                    (like,) = (
                        other
                        for other in streams[to][0].rows
                        if name in other.snapshots
                        and (other.repeat, other.step, other.phase) == (0, row.step, row.phase)
                    )
                    base = streams[to][0].snapshot(like.snapshots[name])
                    away = np.random.default_rng(row.step).standard_normal(count)
                    away *= gap * np.linalg.norm(base) / np.linalg.norm(away)
                    values[offset : offset + count] = base + away
            path = self.scratch / f"{arm}-{rank}.f64"
            values.tofile(path)
            streams[arm][rank] = dataclasses.replace(stream, tensors=path)

    def logged(
        self, streams: Streams, arm: str, change: Callable[[Row], Mapping[str, record.Value]]
    ) -> None:
        """Replace what an arm logged: `change` returns the metrics to put over a row's own."""
        for rank, stream in streams[arm].items():
            rows = [
                dataclasses.replace(row, metrics={**row.metrics, **change(row)})
                for row in stream.rows
            ]
            streams[arm][rank] = dataclasses.replace(stream, rows=rows)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return reproduce(tmp_path_factory.mktemp("logsoftmax_drift"))


@pytest.fixture
def run(layout: Layout, tmp_path: Path) -> Run:
    return Run(layout, tmp_path)


def outcome(run: Run, claim: str, streams: Streams) -> str:
    return run.finding(claim, streams).outcome.value


def floor_of(run: Run, claim: str) -> float:
    floor = run.finding(claim, run.streams()).floor
    assert floor
    return floor


# --- the run as it is ---------------------------------------------------------------------------


def test_a_real_run_finds_what_the_scenario_expects(run):
    found = run.judged(run.streams())
    assert {name: finding.outcome for name, finding in found.items()} == EXPECTED


def test_every_finding_carries_its_numbers(run):
    for name, finding in run.judged(run.streams()).items():
        assert finding.effect is not None, name
        assert finding.unit, name
        assert finding.evidence, name
        assert finding.floor is not None or name == "log_softmax_range", name


def test_the_control_and_the_cure_are_rounding_and_the_fault_is_not(run):
    found = run.judged(run.streams())
    assert found["order_bias"].multiple < 4
    assert found["global_count"].multiple < 4
    assert found["uneven_counts"].multiple > 1e10


def test_the_gap_has_the_size_of_the_wrong_weights(run):
    """Counts c and d weigh a rank's labels (c+d)/2c: known without knowing how the code does it."""
    found = run.finding("uneven_counts", run.streams())
    assert found.evidence["valid labels by rank"] == "[180, 60]"
    # Two independent means of n labels differ by s*sqrt(1/180 + 1/60); a quarter of that is off.
    assert 0.01 < found.evidence["gradient at step 1"] < 0.5


def test_an_even_spread_of_ignored_labels_decides_nothing_about_uneven_counts(tmp_path):
    run = Run(reproduce(tmp_path, "scenario.imbalance=0"), tmp_path)
    found = run.judged(run.streams())
    void = {"uneven_counts", "dice_gap", "global_count", "hard_labels"}
    for name, finding in found.items():
        assert finding.outcome is (Outcome.UNKNOWN if name in void else EXPECTED[name]), name
    for name in void:
        assert "imbalance=0" in found[name].reason, "the value that made it void is named"
        assert "scenario.imbalance=0.5" in found[name].reason
    assert "imbalance=0" in drift.headline(found)


# --- records that are not there -----------------------------------------------------------------


def test_records_that_are_missing_are_never_agreement(run):
    for arm in run.plan.arms:
        streams = run.streams()
        del streams[arm.name][arm.ranks - 1]
        found = run.judged(streams)
        undecided = [name for name, item in found.items() if item.outcome is Outcome.UNKNOWN]
        assert undecided, f"nobody missed rank {arm.ranks - 1} of {arm.name}"
        assert all(found[name].outcome in (Outcome.UNKNOWN, EXPECTED[name]) for name in found)


def test_a_rank_that_did_not_come_to_its_end_decides_nothing(run):
    streams = run.streams()
    streams["equal"][1] = dataclasses.replace(streams["equal"][1], end=None)
    found = run.judged(streams)
    for name in ("ranks_differ", "order_bias", "rounding_scales", "dice_proves_it"):
        assert found[name].outcome is Outcome.UNKNOWN
        assert "rank 1" in found[name].reason


@pytest.mark.parametrize("phase", ["backward", "step"])
def test_a_step_that_no_rank_recorded_is_not_agreement(run, phase):
    streams = run.streams()
    for rank, stream in streams["equal"].items():
        rows = [r for r in stream.rows if not (r.step == 3 and r.phase == phase)]
        streams["equal"][rank] = dataclasses.replace(stream, rows=rows)
    assert outcome(run, "ranks_differ", streams) == "unknown"


def test_a_step_that_one_rank_did_not_record_is_not_agreement(run):
    streams = run.streams()
    rows = [r for r in streams["equal"][1].rows if not (r.step == 3 and r.phase == "step")]
    streams["equal"][1] = dataclasses.replace(streams["equal"][1], rows=rows)
    assert outcome(run, "ranks_differ", streams) == "unknown"


def test_without_permutations_there_is_no_floor_and_no_finding(run):
    arms = tuple(dataclasses.replace(a, repeats=min(a.repeats, 20)) for a in run.plan.arms)
    found = run.judged(run.streams(), dataclasses.replace(run.plan, arms=arms))
    exact = {"ranks_differ", "log_softmax_range", "ignore_index"}
    for name, finding in found.items():
        assert finding.outcome is (EXPECTED[name] if name in exact else Outcome.UNKNOWN), name


def test_a_batch_that_ranks_cannot_share_equally_says_which_batch_would_do(run):
    streams = run.streams()
    share = iter((121, 119))
    for rank in streams["equal"]:
        count = next(share)
        rows = [
            dataclasses.replace(row, metrics={**row.metrics, "valid": count})
            if "valid" in row.metrics
            else row
            for row in streams["equal"][rank].rows
        ]
        streams["equal"][rank] = dataclasses.replace(streams["equal"][rank], rows=rows)
    found = run.finding("order_bias", streams)
    assert found.outcome is Outcome.UNKNOWN
    assert "scenario.batch=480" in found.reason


# --- each judge says each of its findings -------------------------------------------------------


def test_ranks_differ_holds_on_one_bit_and_names_the_place(run):
    streams = run.streams()
    stream = streams["fixed"][1]
    rows = [
        dataclasses.replace(row, metrics={**row.metrics, "grad.digest": "0" * 16})
        if row.step == 3 and "grad.digest" in row.metrics
        else row
        for row in stream.rows
    ]
    streams["fixed"][1] = dataclasses.replace(stream, rows=rows)
    found = run.finding("ranks_differ", streams)
    assert found.outcome is Outcome.HOLDS
    assert "fixed, grad.digest of ranks 0 and 1 differ from step 3" in found.reason
    assert found.effect == 1.0


@pytest.mark.parametrize(
    "arm",
    ["equal", "equal_fp32", "equal_bf16", "equal_log_softmax", "equal_log_of_softmax_fp32"],
)
def test_order_bias_is_not_refuted_by_a_faulty_arm(run, arm):
    streams = run.streams()
    run.tensors_of(streams, arm, arm.replace("equal", "uneven"))
    expected = "holds" if arm == "equal" else "unknown"
    assert outcome(run, "order_bias", streams) == expected


@pytest.mark.parametrize(("floors", "expected"), [(2, "refuted"), (20, "unknown"), (200, "holds")])
def test_order_bias_by_size(run, floors, expected):
    streams = run.streams()
    run.scaled(streams, "equal", "reference", "params", floors * floor_of(run, "order_bias"))
    assert outcome(run, "order_bias", streams) == expected


def test_one_step_far_from_one_process_is_enough_for_order_bias(run):
    streams = run.streams()
    for rank, stream in streams["equal"].items():
        off = {row.step: row for row in streams["uneven"][rank].rows if "params" in row.snapshots}
        values = np.fromfile(stream.tensors)
        for row in stream.rows:
            if row.step == 2 and "params" in row.snapshots:
                at, count = row.snapshots["params"]
                values[at : at + count] = streams["uneven"][rank].snapshot(
                    off[2].snapshots["params"]
                )
        values.tofile(run.scratch / f"late-{rank}.f64")
        streams["equal"][rank] = dataclasses.replace(
            stream, tensors=run.scratch / f"late-{rank}.f64"
        )
    assert outcome(run, "order_bias", streams) == "holds"


def test_rounding_scales_is_refuted_by_a_gap_that_stays(run):
    streams = run.streams()
    run.tensors_of(streams, "equal", "uneven")
    run.tensors_of(streams, "equal_fp32", "uneven_fp32")
    assert outcome(run, "rounding_scales", streams) == "refuted"


def test_rounding_scales_is_unknown_for_any_other_ratio(run):
    streams = run.streams()
    run.scaled(streams, "equal_fp32", "reference_fp32", "params", 1e-3)
    assert outcome(run, "rounding_scales", streams) == "unknown"


def test_hard_labels_holds_where_soft_labels_have_no_gap(run):
    streams = run.streams()
    run.tensors_of(streams, "uneven_soft", "equal_soft")
    assert outcome(run, "hard_labels", streams) == "holds"


@pytest.mark.parametrize(
    ("arm", "like"),
    [
        ("uneven", "equal"),
        ("uneven_soft_rows", "uneven_soft"),
        ("equal_soft", "uneven_soft"),
        ("equal", "uneven"),
        ("uneven_soft_fp32", "equal_soft_fp32"),
        ("uneven_soft_bf16", "equal_soft_bf16"),
    ],
)
def test_hard_labels_is_unknown_without_its_controls(run, arm, like):
    streams = run.streams()
    run.tensors_of(streams, arm, like)
    assert outcome(run, "hard_labels", streams) == "unknown"


@pytest.mark.parametrize(("floors", "expected"), [(2, "refuted"), (20, "unknown"), (200, "holds")])
@pytest.mark.parametrize("counts", ["equal", "uneven"])
@pytest.mark.parametrize(("suffix", "dtype"), [("", "float64"), ("_fp32", "float32")])
def test_form_of_the_loss_by_size(run, suffix, dtype, counts, floors, expected):
    streams = run.streams()
    floor = max(
        Tables(run.plan, streams).permuted(f"reference{suffix}", "params", step=STEPS, phase="step")
    )
    to = f"{counts}{suffix}"
    run.scaled(streams, f"{counts}_log_of_softmax{suffix}", to, "params", floors * floor)
    assert outcome(run, "form_of_the_loss", streams) == expected, dtype


def test_uneven_counts_is_refuted_where_there_is_no_gap(run):
    streams = run.streams()
    for suffix in ("", "_fp32", "_bf16"):
        run.tensors_of(streams, f"uneven{suffix}", f"equal{suffix}")
    found = run.judged(streams)
    assert found["uneven_counts"].outcome is Outcome.REFUTED
    assert found["global_count"].outcome is Outcome.UNKNOWN, "there was nothing to cure"


@pytest.mark.parametrize("suffix", ["_fp32", "_bf16"])
def test_uneven_counts_is_unknown_where_a_dtype_removes_the_gap(run, suffix):
    streams = run.streams()
    run.tensors_of(streams, f"uneven{suffix}", f"equal{suffix}")
    assert outcome(run, "uneven_counts", streams) == "unknown"


def test_uneven_counts_is_unknown_between_rounding_and_a_fault(run):
    streams = run.streams()
    run.scaled(streams, "uneven", "reference", "params", 20 * floor_of(run, "uneven_counts"))
    assert outcome(run, "uneven_counts", streams) == "unknown"


@pytest.mark.parametrize(("floors", "expected"), [(2, "refuted"), (20, "unknown"), (200, "holds")])
@pytest.mark.parametrize("sign", [1, -1])
def test_dice_gap_by_size(run, floors, expected, sign):
    streams = run.streams()
    finding = run.finding("dice_gap", streams)
    base, floor = finding.evidence["soft Dice of one process"], finding.floor
    moved = base + sign * floors * floor
    run.logged(
        streams, "uneven", lambda row: {"dice_soft": moved} if "dice_soft" in row.metrics else {}
    )
    assert outcome(run, "dice_gap", streams) == expected


def test_dice_gap_is_unknown_where_the_parameters_have_no_gap(run):
    streams = run.streams()
    run.tensors_of(streams, "uneven", "equal")
    found = run.finding("dice_gap", streams)
    assert found.outcome is Outcome.UNKNOWN
    assert "no gap that could reach Dice" in found.reason


@pytest.mark.parametrize(
    ("claim", "arm", "to"),
    [
        ("form_of_the_loss", "uneven_log_of_softmax", "uneven"),
        ("order_bias", "equal", "reference"),
        ("hard_labels", "uneven_soft", "reference_soft"),
        ("uneven_counts", "uneven", "reference"),
        ("dice_loss", "dice_loss", "reference_dice_loss"),
        ("class_weights", "class_weights_fixed", "reference_class_weights"),
    ],
)
def test_parameters_that_are_not_numbers_are_neither_rounding_nor_a_gap(run, claim, arm, to):
    streams = run.streams()
    run.scaled(streams, arm, to, "params", math.nan)
    found = run.finding(claim, streams)
    assert found.outcome is Outcome.UNKNOWN
    assert arm in found.reason
    assert "scenario.lr=0.5" in found.reason


@pytest.mark.parametrize(
    ("claim", "arm"),
    [
        ("uneven_counts", "uneven_bf16"),
        ("uneven_counts", "reference_fp32"),
        ("global_count", "fixed_bf16"),
        ("form_of_the_loss", "equal_log_softmax_fp32"),
        ("rounding_scales", "equal"),
    ],
)
def test_an_arm_that_computed_in_another_dtype_decides_nothing(run, claim, arm):
    streams = run.streams()
    wrong = "float32" if arm.endswith("bf16") or arm == "equal" else "float64"
    run.logged(streams, arm, lambda row: {"logits": wrong} if "logits" in row.metrics else {})
    found = run.finding(claim, streams)
    assert found.outcome is Outcome.UNKNOWN
    assert f"arm {arm}" in found.reason
    assert f"are {wrong}, not" in found.reason


def test_equal_bits_of_gradients_that_are_not_finite_are_no_agreement(run):
    streams = run.streams()
    run.logged(
        streams,
        "fixed",
        lambda row: {"grad.nonfinite": 1} if row.step == 3 and "grad.digest" in row.metrics else {},
    )
    found = run.finding("ranks_differ", streams)
    assert found.outcome is Outcome.UNKNOWN
    assert "grad is not finite at step 3" in found.reason


def test_a_rank_without_a_valid_label_turns_no_finding_over(tmp_path):
    run = Run(
        reproduce(tmp_path, "scenario.batch=8", "gpus=4", "scenario.imbalance=0.75"), tmp_path
    )
    found = run.judged(run.streams())
    assert found["uneven_counts"].evidence["valid labels by rank"] == "[2, 1, 1, 0]"
    for name, finding in found.items():
        assert finding.outcome in (Outcome.UNKNOWN, EXPECTED[name]), (name, finding.reason)


def test_without_training_the_learning_rate_is_named(tmp_path):
    run = Run(reproduce(tmp_path, "scenario.lr=0"), tmp_path)
    found = run.judged(run.streams())
    for name in ("order_bias", "uneven_counts", "form_of_the_loss", "global_count"):
        assert found[name].outcome is Outcome.UNKNOWN
        assert "scenario.lr=0" in found[name].reason


def test_unequal_rows_are_no_control_for_the_mean_over_rows(run):
    plan = dataclasses.replace(run.plan, params={**run.plan.params, "batch": 481})
    found = run.judged(run.streams(), plan)["hard_labels"]
    assert found.outcome is Outcome.UNKNOWN
    assert "scenario.batch=484" in found.reason


def test_the_worst_rank_counts(run):
    streams = run.streams()
    run.scaled(streams, "equal", "reference", "params", 1e-3)
    streams["equal"][0] = run.streams()["equal"][0]
    assert outcome(run, "order_bias", streams) == "holds"


def test_dice_proves_nothing_unless_the_counts_add_up(run):
    streams = run.streams()
    stream = streams["equal"][1]
    values = np.fromfile(stream.tensors)
    for row in stream.rows:
        if "mine" in row.snapshots:
            values[row.snapshots["mine"][0]] += 1
    values.tofile(run.scratch / "mine.f64")
    streams["equal"][1] = dataclasses.replace(stream, tensors=run.scratch / "mine.f64")
    assert outcome(run, "dice_proves_it", streams) == "unknown"


def test_dice_proves_nothing_where_the_gradients_are_wrong(run):
    streams = run.streams()
    run.scaled(streams, "equal", "reference", "params", 1e-3)
    assert outcome(run, "dice_proves_it", streams) == "unknown"


@pytest.mark.parametrize(
    ("suffix", "expected"), [("", "refuted"), ("_fp32", "unknown"), ("_bf16", "unknown")]
)
def test_global_count_without_the_fix(run, suffix, expected):
    streams = run.streams()
    run.tensors_of(streams, f"fixed{suffix}", f"uneven{suffix}")
    assert outcome(run, "global_count", streams) == expected


@pytest.mark.parametrize("loss", ["class_weights", "dice_loss"])
def test_other_losses_are_refuted_without_fault_and_without_cure(run, loss):
    streams = run.streams()
    run.tensors_of(streams, loss, f"{loss}_fixed")
    assert outcome(run, loss, streams) == "refuted", "no fault"
    streams = run.streams()
    run.tensors_of(streams, f"{loss}_fixed", loss)
    assert outcome(run, loss, streams) == "refuted", "no cure"
    streams = run.streams()
    run.scaled(streams, loss, f"reference_{loss}", "params", 20 * floor_of(run, loss))
    assert outcome(run, loss, streams) == "unknown", "neither"


def test_implicit_mask_holds_only_with_zeros_and_another_gradient(run):
    streams = run.streams()
    zeros = {"zeros": 100}
    run.logged(streams, "softmax_alone", lambda row: zeros if "zeros" in row.metrics else {})
    assert outcome(run, "implicit_mask", streams) == "unknown", "zeros, yet the formula's values"
    run.scaled(streams, "softmax_alone", "softmax_alone", "formula", 0.5)
    assert outcome(run, "implicit_mask", streams) == "holds"


def test_an_implicit_mask_is_not_refuted_by_counting_zeros_alone(run):
    streams = run.streams()
    run.scaled(streams, "softmax_alone", "softmax_alone", "formula", 0.5)
    assert outcome(run, "implicit_mask", streams) == "unknown"


@pytest.mark.parametrize(("floors", "expected"), [(2, "refuted"), (20, "unknown"), (200, "holds")])
def test_log_softmax_precision_by_size(run, floors, expected):
    streams = run.streams()
    floor = floor_of(run, "log_softmax_precision")
    truth = _snapshot(streams, "log_softmax", 28, "float64")
    away = np.random.default_rng(0).standard_normal(truth.size)
    away *= floors * floor * np.linalg.norm(truth) / np.linalg.norm(away)
    _overwrite(run, streams, "log_of_softmax", 28, "float32", truth + away)
    assert outcome(run, "log_softmax_precision", streams) == expected


def test_log_softmax_range_is_refuted_where_both_or_neither_break(run):
    streams = run.streams()
    good = _snapshot(streams, "log_softmax.finite_at", 0, "float32")
    for dtype in ("float32", "bfloat16", "float16"):
        _overwrite(run, streams, "log_of_softmax.finite_at", 0, dtype, good)
    assert outcome(run, "log_softmax_range", streams) == "refuted", "neither breaks"
    streams = run.streams()
    bad = _snapshot(streams, "log_of_softmax.finite_at", 0, "float16")
    _overwrite(run, streams, "log_softmax.finite_at", 0, "float16", bad)
    assert outcome(run, "log_softmax_range", streams) == "refuted", "both break"


@pytest.mark.parametrize("first", [60, 88, 107])
def test_log_softmax_range_is_unknown_where_the_limit_is_another(run, first):
    streams = run.streams()
    finite = np.array([float(gap < first) for gap in range(1, 121)])
    _overwrite(run, streams, "log_of_softmax.finite_at", 0, "float32", finite)
    assert outcome(run, "log_softmax_range", streams) == "unknown"


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ({"cross_entropy(-1)": "nothing", "cross_entropy(16)": "nothing"}, "holds"),
        ({"cross_entropy(-1)": "nothing"}, "unknown"),
        ({"cross_entropy(-100)": "IndexError"}, "unknown"),
        ({"cross_entropy(-1)": "RuntimeError"}, "refuted"),
    ],
)
def test_ignore_index_by_what_raised(run, raised, expected):
    streams = run.streams()
    run.logged(
        streams,
        "softmax_alone",
        lambda row: {name: value for name, value in raised.items() if name in row.metrics},
    )
    assert outcome(run, "ignore_index", streams) == expected


def _row(streams: Streams, name: str, step: int, phase: str) -> Row:
    (found,) = (
        row
        for row in streams["softmax_alone"][0].rows
        if name in row.snapshots and (row.repeat, row.step, row.phase) == (0, step, phase)
    )
    return found


def _snapshot(streams: Streams, name: str, step: int, phase: str) -> np.ndarray:
    place = _row(streams, name, step, phase).snapshots[name]
    return streams["softmax_alone"][0].snapshot(place)


def _overwrite(
    run: Run, streams: Streams, name: str, step: int, phase: str, values: np.ndarray
) -> None:
    stream = streams["softmax_alone"][0]
    offset, count = _row(streams, name, step, phase).snapshots[name]
    assert count == values.size
    everything = np.fromfile(stream.tensors)
    everything[offset : offset + count] = values
    path = run.scratch / f"{name}-{phase}.f64"
    everything.tofile(path)
    streams["softmax_alone"][0] = dataclasses.replace(stream, tensors=path)


# --- the headline -------------------------------------------------------------------------------


def test_the_headline_follows_the_findings(run):
    found = dict(run.judged(run.streams()))
    assert drift.headline(found).startswith("Neither log_softmax nor the all-reduce order")
    void = found | {"uneven_counts": unknown("imbalance=0 is why")}
    assert "imbalance=0 is why" in drift.headline(void)
    assert "Neither" not in drift.headline(void)
    other = found | {"order_bias": unknown("no floor")}
    assert drift.headline(other).startswith("Not all is decided: the all-reduce order (unknown: no")
    against = dataclasses.replace(found["order_bias"], outcome=Outcome.HOLDS)
    assert drift.headline(found | {"order_bias": against}).startswith("Not what is known")


# --- who gets which rows ------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("imbalance", [0.0, 0.25, 0.5, 0.75])
def test_shares_add_up_and_spread_as_asked(world, imbalance):
    counts = drift.valid_counts(240, world, imbalance)
    assert sum(counts) == 240
    assert len(counts) == world
    assert counts == sorted(counts, reverse=True) or imbalance == 0.0
    mean = 240 / world
    assert counts[0] == pytest.approx(mean * (1 + imbalance), abs=1)
    assert counts[-1] == pytest.approx(mean * (1 - imbalance), abs=1)
    if imbalance == 0.0:
        assert len(set(counts)) == 1


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 8, 16, 64])
@pytest.mark.parametrize("imbalance", [0.0, 0.3, 0.75])
def test_a_deal_holds_every_row_once_and_gives_each_rank_its_labels(world, imbalance):
    counts = drift.valid_counts(240, world, imbalance)
    order = drift.deal(480, counts)
    assert sorted(order) == list(range(480))
    for rank, count in enumerate(counts):
        assert sum(row < 240 for row in order[rank::world]) == count


@pytest.mark.parametrize("world", [2, 8, 100])
def test_a_batch_smaller_than_its_ranks_is_dealt_out_all_the_same(world):
    order = drift.deal(8, drift.valid_counts(4, world, 0.75))
    assert sorted(order) == list(range(8))


@pytest.mark.parametrize("steps", [1, 2, 3, 12, 16, 100])
def test_values_are_kept_at_the_first_and_the_last_step(steps):
    found = drift.marks(steps)
    assert found[0] == 1
    assert found[-1] == steps
    assert found == sorted(set(found))


# --- the module ---------------------------------------------------------------------------------


def test_the_yaml_holds_what_the_parameters_ask_for():
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/scenario/logsoftmax_drift.yaml"))
    assert violations(drift.Params, values) == []
    assert violations(drift.Params, values | {"imbalance": 1.0})
    assert violations(drift.Params, values | {"steps": 0})


def test_listing_and_judging_need_no_torch():
    code = (
        "import sys, scenarios.logsoftmax_drift as s; assert 'torch' not in sys.modules; "
        "assert 'numpy' not in sys.modules; print(len(s.SCENARIO.arms))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_axes_of_the_report_are_all_there():
    arms = [arm for arm in drift.SCENARIO.arms if arm.ranks is None]
    crossed = {(arm["loss"], arm["counts"], arm["dtype"]) for arm in arms}
    for loss in ("cross_entropy", "log_softmax", "log_of_softmax", "soft"):
        for dtype in ("float64", "float32", "bfloat16"):
            assert {(loss, "equal", dtype), (loss, "uneven", dtype)} <= crossed
    for counts, divisor in (("equal", "rank"), ("uneven", "rank"), ("uneven", "all ranks")):
        dtypes = {
            arm["dtype"] for arm in arms if (arm["counts"], arm["divisor"]) == (counts, divisor)
        }
        assert dtypes == {"float64", "float32", "bfloat16"}
    assert len({arm.name for arm in drift.SCENARIO.arms}) == len(drift.SCENARIO.arms)
