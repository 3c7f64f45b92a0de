"""Aligned tables: absence is never agreement, and the first divergence is the earliest executed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from harness.errors import MissingRecord, RecordError
from harness.tables import Tables, relative_l2
from tests import streams


def both(step: int, phase: str, zero: dict[str, object], one: dict[str, object]) -> list:
    return [
        ("a", 0, {"step": step, "phase": phase, "metrics": zero}),
        ("a", 1, {"step": step, "phase": phase, "metrics": one}),
    ]


def tables(tmp_path: Path, rows: list, **more: object) -> Tables:
    return Tables.read(streams.write(tmp_path, streams.plan({"a": 2}), rows, **more))


def test_values_come_back_where_they_were_logged(tmp_path: Path) -> None:
    t = tables(
        tmp_path, both(1, "f", {"x": 1.5}, {"x": math.nan}) + both(2, "f", {"x": 2}, {"x": 3})
    )
    assert t.value("a", "x", step=1, phase="f") == 1.5
    assert math.isnan(t.value("a", "x", step=1, phase="f", rank=1))
    assert t.series("a", "x", rank=1)[2] == 3
    assert t.last("a", "x") == 2
    assert t.moments("a") == [(1, "f"), (2, "f")]


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.value("a", "x", step=9),
        lambda t: t.value("a", "y", step=1),
        lambda t: t.value("b", "x", step=1),
        lambda t: t.value("a", "x", step=1, rank=7),
        lambda t: t.value("a", "x", step=1, repeat=1),
        lambda t: t.series("a", "y"),
        lambda t: t.snapshot("a", "x", step=1),
        lambda t: t.ranks("b"),
        lambda t: t.require("b"),
    ],
)
def test_what_is_not_there_raises(tmp_path: Path, ask: object) -> None:
    t = tables(tmp_path, both(1, "", {"x": 1}, {"x": 1}))
    with pytest.raises(MissingRecord):
        ask(t)  # type: ignore[operator]


def test_require_names_who_did_not_come_to_an_end(tmp_path: Path) -> None:
    t = tables(tmp_path, both(4, "", {"x": 1}, {"x": 1}), ends={("a", 1): None})
    with pytest.raises(MissingRecord, match="rank 1 ended after step 4"):
        t.require("a")


def test_require_prefers_the_culprit_to_its_victims(tmp_path: Path) -> None:
    layout = streams.write(
        tmp_path, streams.plan({"a": 2}), [], ends={("a", 0): None, ("a", 1): None}
    )
    for rank, error in ((0, "RuntimeError: Connection closed by peer"), (1, "ValueError: mine")):
        with layout.stream("a", rank).open("a") as file:
            file.write(f'{{"end":"failed","error":"{error}"}}\n')
    with pytest.raises(MissingRecord, match=r"rank 1 .*mine"):
        Tables.read(layout).require("a")


def test_first_divergence_follows_the_order_of_execution_not_of_names(tmp_path: Path) -> None:
    rows = both(1, "forward", {"z.digest": "1", "x.norm": 1.0}, {"z.digest": "2", "x.norm": 1.0})
    rows += both(1, "step", {"a.digest": "1"}, {"a.digest": "9"})
    found = tables(tmp_path, rows).first_divergence("a")
    assert found is not None
    assert (found.step, found.phase, found.metric, found.values) == (
        1,
        "forward",
        "z.digest",
        ("1", "2"),
    )


def test_equal_digests_are_agreement_and_missing_ones_are_not(tmp_path: Path) -> None:
    same = both(1, "", {"z.digest": "1"}, {"z.digest": "1"})
    assert tables(tmp_path / "same", same).first_divergence("a") is None
    lacking = both(1, "", {"z.digest": "1"}, {"other.digest": "1"})
    with pytest.raises(MissingRecord):
        tables(tmp_path / "lacking", lacking).first_divergence("a")
    with pytest.raises(MissingRecord, match="nothing recorded"):
        tables(tmp_path / "nothing", both(1, "", {"x": 1}, {"x": 2})).first_divergence("a")


def test_nan_on_both_ranks_is_no_divergence_and_on_one_is(tmp_path: Path) -> None:
    nan = math.nan
    assert (
        tables(tmp_path / "b", both(1, "", {"x": nan}, {"x": nan})).first_divergence(
            "a", metrics=("x",)
        )
        is None
    )
    found = tables(tmp_path / "o", both(1, "", {"x": 1.0}, {"x": nan})).first_divergence(
        "a", metrics=("x",)
    )
    assert found is not None
    assert found.ranks == (0, 1)


def test_distances_are_relative_and_in_float64(tmp_path: Path) -> None:
    layout = streams.write(
        tmp_path,
        streams.plan({"ref": 1, "a": 2}, repeats={"ref": 3}),
        [
            ("ref", 0, {"step": 5, "tensors": {"w": [3.0, 4.0]}}),
            ("ref", 0, {"step": 5, "repeat": 1, "tensors": {"w": [3.0, 4.0 + 1e-12]}}),
            ("ref", 0, {"step": 5, "repeat": 2, "tensors": {"w": [3.0, 4.5]}}),
            ("a", 1, {"step": 5, "tensors": {"w": [3.0, 9.0]}}),
        ],
    )
    t = Tables.read(layout)
    assert t.distance("a", "ref", "w", step=5, rank=1) == pytest.approx(1.0, rel=1e-15)
    small, large = t.permuted("ref", "w", step=5)
    assert small == pytest.approx(2e-13, rel=1e-3)
    assert large == pytest.approx(0.1, rel=1e-12)


def test_relative_l2_at_its_edges() -> None:
    zero, one = np.zeros(3), np.ones(3)
    assert relative_l2(zero, zero) == 0.0
    assert relative_l2(one, zero) == math.inf
    assert math.isnan(relative_l2(np.array([np.nan, 0, 0]), one))
    with pytest.raises(MissingRecord, match="3 and 2"):
        relative_l2(one, np.ones(2))


def test_records_of_another_run_are_refused(tmp_path: Path) -> None:
    of = streams.plan({"a": 1})
    layout = streams.write(tmp_path, of, [])
    layout.plan.write_text(streams.plan({"a": 1}, run_id="run-2").to_json())
    with pytest.raises(RecordError, match=r"run-1.*run-2"):
        Tables.read(layout)


@pytest.mark.parametrize("wrong", ["rank", "arm"])
def test_a_stream_in_the_place_of_another_is_refused(tmp_path: Path, wrong: str) -> None:
    layout = streams.write(tmp_path, streams.plan({"a": 2, "b": 2}), [])
    one = layout.stream("a", 0)
    other = layout.stream("a", 1) if wrong == "rank" else layout.stream("b", 0)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    with pytest.raises(RecordError, match=r"written by rank"):
        Tables.read(layout)


def test_the_last_record_missing_on_rank_0_alone_is_no_agreement(tmp_path: Path) -> None:
    same = both(1, "", {"z.digest": "1"}, {"z.digest": "1"})
    more = [("a", 1, {"step": 2, "metrics": {"z.digest": "2"}})]
    with pytest.raises(MissingRecord, match=r"rank 0 has no z\.digest at step 2"):
        tables(tmp_path, same + more).first_divergence("a")


def test_a_divergence_before_rank_0_was_lost_is_still_found(tmp_path: Path) -> None:
    apart = both(1, "", {"z.digest": "1"}, {"z.digest": "2"})
    more = [("a", 1, {"step": 2, "metrics": {"z.digest": "2"}})]
    found = tables(tmp_path, apart + more).first_divergence("a")
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("change", [lambda v: v * 2, lambda v: v[::-1] + 0.5, lambda v: v * 0])
def test_values_that_are_not_those_the_rank_described_are_refused(
    tmp_path: Path, change: object
) -> None:
    values = [1.0, 2.0, 3.0]
    said = {"w.min": 1.0, "w.max": 3.0, "w.norm": 14.0**0.5, "w.nonfinite": 0}
    layout = streams.write(
        tmp_path, streams.plan({"a": 1}), [("a", 0, {"metrics": said, "tensors": {"w": values}})]
    )
    assert Tables.read(layout).snapshot("a", "w", step=0).tolist() == values
    assert callable(change)
    change(np.fromfile(layout.tensors("a", 0))).tofile(layout.tensors("a", 0))
    with pytest.raises(RecordError, match="do not belong together"):
        Tables.read(layout).snapshot("a", "w", step=0)


def test_one_value_between_the_extremes_is_missed_by_none_of_the_three(tmp_path: Path) -> None:
    said = {"w.min": 1.0, "w.max": 3.0, "w.norm": 14.0**0.5, "w.nonfinite": 0}
    layout = streams.write(
        tmp_path, streams.plan({"a": 1}), [("a", 0, {"metrics": said, "tensors": {"w": [1, 2, 3]}})]
    )
    np.array([1.0, 2.001, 3.0]).tofile(layout.tensors("a", 0))
    with pytest.raises(RecordError, match="norm"):
        Tables.read(layout).snapshot("a", "w", step=0)


def test_a_snapshot_with_nan_is_not_compared_with_its_extremes(tmp_path: Path) -> None:
    said = {"w.min": math.nan, "w.max": math.nan, "w.norm": math.nan, "w.nonfinite": 1}
    row = {"metrics": said, "tensors": {"w": [1.0, math.nan]}}
    layout = streams.write(tmp_path, streams.plan({"a": 1}), [("a", 0, row)])
    assert math.isnan(Tables.read(layout).snapshot("a", "w", step=0)[1])
