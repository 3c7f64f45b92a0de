"""What a sweep measures and writes: gaps and floors of hand-written runs, tables, points."""

from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import MissingRecord, RecordError
from harness.plan import Layout, write_text
from harness.scenario import Arm, Role, Scenario
from harness.tables import Tables
from launch import loss, points, sweep_tables
from launch.points import Clock, Done, Finished, exit_code
from launch.sweep import swept_values
from tests import streams

REPEATS = 21


def arm(name: str, role: Role = Role.FAULTY, **options: Any) -> Arm:
    return Arm(name=name, role=role, about="", options=options)


def scenario(*arms: Arm) -> Scenario:
    return Scenario(
        title="",
        family="",
        cause="",
        claims=(),
        arms=arms,
        params=dict,
        run=lambda rank, arm, params: None,
        headline=lambda findings: "",
    )


def run(
    root: Path,
    losses: dict[str, list[list[float]]],
    repeats: dict[str, list[list[float]]],
    **more: Any,
) -> Tables:
    """Write a run: arm -> rank -> loss by step, and for references repeat -> loss by step."""
    plan = streams.plan(
        {name: len(ranks) for name, ranks in losses.items()},
        repeats={name: 1 + len(found) for name, found in repeats.items()},
    )
    rows = [
        (name, rank, {"step": step, "metrics": {"loss": value}})
        for name, ranks in losses.items()
        for rank, series in enumerate(ranks)
        for step, value in enumerate(series, 1)
        if value is not None
    ]
    rows += [
        (name, 0, {"step": step, "repeat": repeat, "metrics": {"loss": value}})
        for name, found in repeats.items()
        for repeat, series in enumerate(found, 1)
        for step, value in enumerate(series, 1)
    ]
    return Tables.read(streams.write(root, plan, rows, **more))


def row(tables: Tables, of: Scenario, name: str) -> dict[str, Any]:
    return next(found for found in loss.rows(tables, of) if found["arm"] == name)


REFERENCE = arm("one", Role.REFERENCE)
TWO = scenario(REFERENCE, arm("many"))
FLAT = [[1.0, 1.0]] * 19


def test_gap_and_drift_are_absolute_and_in_floors_of_their_own_step(tmp_path):
    # the floor is 2^-10 at step 1; at step 2 it is 2^-12 and keeps what there was before
    moved = [*FLAT, [1.0 + 2**-10, 1.0 - 2**-12]]
    tables = run(tmp_path, {"one": [[1.0, 1.0]], "many": [[1.0, 2.0], [1.5, 2.25]]}, {"one": moved})
    found = row(tables, TWO, "many")
    assert found["loss_reference"] == "one"
    assert (found["loss_gap_first"], found["loss_gap_last"], found["loss_gap_max"]) == (
        0.5,
        0.25,
        0.5,
    )
    assert (found["loss_drift_first"], found["loss_drift_last"]) == (0.25, 1.125)
    assert found["loss_floor"] == 2**-10
    assert found["loss_gap_first_floors"] == 512.0
    assert found["loss_gap_last_floors"] == 256.0
    assert found["loss_drift_max_floors"] == 1152.0


def test_a_figure_is_not_divided_by_the_floor_of_a_later_step(tmp_path):
    moved = [*FLAT, [1.0 + 2**-20, 1.0 + 2**-2]]
    tables = run(tmp_path, {"one": [[1.0, 1.0]], "many": [[1.0, 1.0], [1.5, 1.0]]}, {"one": moved})
    found = row(tables, TWO, "many")
    assert found["loss_gap_first_floors"] == 2.0**19
    assert found["loss_gap_max_floors"] == 2.0**19
    assert found["loss_gap_last_floors"] == 0.0


def test_a_step_that_no_permutation_moved_has_no_floor(tmp_path):
    moved = [*FLAT, [1.0, 1.5]]
    tables = run(tmp_path, {"one": [[1.0, 1.0]], "many": [[1.0, 1.0], [1.5, 1.0]]}, {"one": moved})
    found = row(tables, TWO, "many")
    assert found["loss_gap_first_floors"] is None
    assert found["loss_gap_last_floors"] == 0.0


def test_one_rank_has_no_gap_across_ranks_and_a_drift(tmp_path):
    moved = [*FLAT, [1.5, 1.5]]
    tables = run(tmp_path, {"one": [[1.0, 1.0]], "many": [[1.0, 3.0]]}, {"one": moved})
    found = row(tables, TWO, "many")
    assert found["loss_gap_first"] is found["loss_gap_last"] is found["loss_gap_max"] is None
    assert found["loss_drift_last"] == 2.0
    assert row(tables, TWO, "one")["loss_drift_last"] is None


@pytest.mark.parametrize("moved", [FLAT, [[1.0, 1.0]] * 20, [*FLAT, [1.0, math.nan]]])
def test_no_floor_without_20_permutations_that_move_and_are_finite(tmp_path, moved):
    tables = run(tmp_path, {"one": [[1.0, 1.0]], "many": [[1.0, 1.0], [1.5, 1.0]]}, {"one": moved})
    found = row(tables, TWO, "many")
    assert found["loss_floor"] is None
    assert found["loss_gap_max_floors"] is None
    assert found["loss_gap_max"] == 0.5
    assert "no floor" in found["loss_note"]


def test_each_dtype_is_held_against_the_floor_of_its_own_reference(tmp_path):
    arms = (
        arm("one", Role.REFERENCE, dtype="float64"),
        arm("one_fp32", Role.REFERENCE, dtype="float32"),
        arm("many", dtype="float64"),
        arm("many_fp32", dtype="float32"),
        arm("many_bf16", dtype="bfloat16"),
    )
    pair = [[1.0], [1.5]]
    tables = run(
        tmp_path,
        {"one": [[1.0]], "one_fp32": [[1.0]]}
        | dict.fromkeys(("many", "many_fp32", "many_bf16"), pair),
        {"one": [[1.0 + 2**-50]] * 20, "one_fp32": [[1.0 + 2**-20]] * 20},
    )
    found = {item["arm"]: item for item in loss.rows(tables, scenario(*arms))}
    assert found["many"]["loss_floor"] == 2**-50
    assert found["many_fp32"]["loss_floor"] == 2**-20
    assert found["many_bf16"]["loss_floor"] is None
    assert found["many_bf16"]["loss_drift_last"] is None
    assert found["many_bf16"]["loss_gap_last"] == 0.5


def test_an_arm_has_a_reference_only_where_exactly_one_fits():
    plain, soft = (
        arm(f"ref_{kind}", Role.REFERENCE, labels=kind, dtype="float64")
        for kind in ("hard", "soft")
    )
    of = scenario(plain, soft)
    assert loss.reference_of(arm("a", labels="soft", dtype="float64", clip=1), of) is soft
    assert loss.reference_of(arm("a", labels="soft", dtype="float32"), of) is None
    assert loss.reference_of(arm("a", labels="other", dtype="float64"), of) is None
    assert loss.reference_of(arm("a", dtype="float64"), of) is None
    twins = scenario(arm("b", Role.REFERENCE), arm("c", Role.REFERENCE))
    assert loss.reference_of(arm("a"), twins) is None
    # one reference whose dtype is not the arm's own
    assert loss.reference_of(arm("a", dtype="float64"), scenario(arm("b", Role.REFERENCE))) is None


def test_nan_of_one_rank_is_no_agreement(tmp_path):
    series = {"one": [[1.0, 1.0, 1.0]], "many": [[1.0, math.nan, 5.0], [1.0, 1.0, 1.0]]}
    found = row(run(tmp_path, series, {}), TWO, "many")
    assert math.isnan(found["loss_gap_max"])
    assert found["loss_gap_last"] == 4.0
    assert found["loss_note"].startswith("not finite from step 2 on")


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=5), st.randoms()
)
def test_the_gap_does_not_depend_on_the_order_of_ranks(values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    assert repr(loss.gap(values)) == repr(loss.gap(shuffled))
    if any(map(math.isnan, values)):
        assert math.isnan(loss.gap(values))
    else:
        assert loss.gap(values) >= 0.0


def test_the_same_infinity_everywhere_is_no_gap():
    assert loss.gap([math.inf, math.inf]) == 0.0
    assert loss.gap([math.inf, 1.0]) == math.inf


@pytest.mark.parametrize(
    ("values", "mean"),
    [([1e308, 1.5e308], 1.25e308), ([math.inf, 1.0], math.inf), ([0.1] * 10, 0.1)],
)
def test_a_mean_rounds_once_and_survives_large_numbers(values, mean):
    assert loss.mean(values) == mean


def test_a_rank_that_was_cut_off_gives_no_figures(tmp_path):
    series = {"one": [[1.0, 1.0]], "many": [[1.0, 1.0], [1.0, 1.0]]}
    tables = run(tmp_path, series, {}, ends={("many", 1): None})
    found = row(tables, TWO, "many")
    assert found["loss_gap_last"] is None
    assert "rank 1" in found["loss_note"]


def test_a_step_that_one_rank_lacks_gives_no_figures(tmp_path):
    tables = run(tmp_path, {"one": [[1.0, 1.0]], "many": [[1.0, 1.0], [1.0, None]]}, {})
    found = row(tables, TWO, "many")
    assert found["loss_gap_first"] is None
    assert "rank 1 has no loss at step 2" in found["loss_note"]
    with pytest.raises(MissingRecord, match="step 2"):
        loss.losses(tables, "many")


def test_an_arm_without_losses_is_a_row_all_the_same(tmp_path):
    layout = streams.write(
        tmp_path,
        streams.plan({"one": 1, "many": 2}),
        [("one", 0, {"step": 1, "metrics": {"x": 1}})],
    )
    found = loss.rows(Tables.read(layout), TWO)
    assert [item["arm"] for item in found] == ["one", "many"]
    assert list(found[0]) == list(loss.COLUMNS)
    assert "loss" in found[0]["loss_note"]


def test_swept_keys_are_those_that_differ_with_their_typed_values():
    overrides = [
        ["scenario=probe", "scenario.sizes=[1,2]", "seed=1", "scenario.label='a,b'"],
        ["scenario=probe", "scenario.sizes=[3]", "seed=1", "scenario.label=null"],
        ["scenario=probe", "scenario.sizes=[3]", "seed=0.5", "scenario.label=c"],
    ]
    assert swept_values(overrides) == [
        {"scenario.sizes": [1, 2], "seed": 1, "scenario.label": "a,b"},
        {"scenario.sizes": [3], "seed": 1, "scenario.label": None},
        {"scenario.sizes": [3], "seed": 0.5, "scenario.label": "c"},
    ]


def test_a_key_column_has_one_type():
    points = [
        {"a": 0, "b": 1, "c": True, "d": [1], "e": "x", "f": True},
        {"a": 0.5, "b": 2, "c": False, "d": [2], "e": None, "f": 1},
    ]
    kinds = {"a": float, "b": int, "c": bool, "d": str, "e": str, "f": str}
    assert sweep_tables.key_columns(points) == kinds


ROWS = [
    {"n": 1, "x": 0.1 + 0.2, "ok": True, "t": 'a "quoted", text\nof two lines'},
    {"n": 2, "x": math.nan, "ok": False, "t": None},
    {"n": None, "x": None, "ok": None, "t": ""},
]
COLUMNS = {"n": int, "x": float, "ok": bool, "t": str}


def test_tables_keep_every_digit_and_tell_nothing_from_not_a_number(tmp_path):
    sweep_tables.write(tmp_path, "table", COLUMNS, ROWS)
    with (tmp_path / "table.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [item["x"] for item in read] == ["0.30000000000000004", "nan", ""]
    assert read[0]["t"] == ROWS[0]["t"]
    assert [item["ok"] for item in read] == ["true", "false", ""]
    parquet = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "table.parquet")
    back = parquet.to_pylist()
    assert math.isnan(back[1]["x"])
    assert back[0] == ROWS[0]
    assert back[2] == ROWS[2]


def test_a_column_without_a_value_keeps_its_type_in_parquet(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    sweep_tables.write(tmp_path, "table", COLUMNS, [dict.fromkeys(COLUMNS)])
    types = [str(kind) for kind in pq.read_schema(tmp_path / "table.parquet").types]
    assert types == ["int64", "double", "bool", "string"]


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")
    sweep_tables.write(tmp_path, "table", COLUMNS, ROWS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(table, path):
        Path(path).write_bytes(b"PAR1 half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(RecordError, match=r"table\.parquet: No space left"):
        sweep_tables.write(tmp_path, "table", COLUMNS, ROWS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def done(code: int | None, *, run: bool = True) -> Done:
    return Done(number=1, state="", exit_code=code, layout=Layout(Path("x")) if run else None)


@pytest.mark.parametrize(
    ("points", "code"),
    [
        ([done(0), done(0)], 0),
        ([done(0), done(11)], 11),
        ([done(11), done(10), done(0)], 10),
        ([done(0), done(2, run=False)], 11),
        ([done(0), done(None, run=False)], 11),
        ([done(12, run=False), done(12, run=False)], 12),
        ([done(None, run=False)], 11),
    ],
)
def test_the_exit_code_is_the_gravest(points, code):
    assert exit_code(points) == code


def finished(folder: Path, name: str, point: str, *, failures: list[str] | None) -> Path:
    layout = Layout(folder / name)
    write_text(layout.environment, json.dumps({"point": point}))
    write_text(layout.plan, json.dumps({"engine": "warm"}))
    if failures is not None:
        write_text(layout.verdict, json.dumps({"failures": failures}))
    return layout.root


def test_only_sound_runs_of_the_same_point_and_engine_are_taken(tmp_path):
    sound = finished(tmp_path, "1", "a", failures=[])
    finished(tmp_path, "2", "b", failures=["rank 1 failed"])
    finished(tmp_path, "3", "c", failures=None)
    write_text(tmp_path / "4" / "verdict.json", "{")
    known = Finished()
    assert known.find(tmp_path, "a", "warm") == Layout(sound)
    assert known.find(tmp_path, "a", "torchrun") is None
    assert known.find(tmp_path, "b", "warm") is None
    assert known.find(tmp_path, "c", "warm") is None
    assert known.find(tmp_path / "absent", "a", "warm") is None


def test_a_run_that_ends_meanwhile_is_found(tmp_path):
    known = Finished()
    root = finished(tmp_path, "1", "a", failures=None)
    assert known.find(tmp_path, "a", "warm") is None
    write_text(Layout(root).verdict, json.dumps({"failures": []}))
    assert known.find(tmp_path, "a", "warm") == Layout(root)


def test_the_time_left_counts_only_what_was_run():
    now = [0.0]
    clock = Clock(40, now=lambda: now[0])
    clock.start()
    assert clock.left(0) == ""
    clock.end(10, counts=False)  # found finished, in no time
    clock.start()
    now[0] = 20.0
    clock.end(10, counts=True)
    clock.start()
    now[0] = 30.0
    # 15 arms took 30 s, 15 are left
    assert clock.left(5) == ", about 30 s left"
    now[0] = 300.0
    assert clock.left(5) == ", about 5 min left"


def test_a_run_that_was_seen_finished_is_not_read_twice(tmp_path, monkeypatch):
    known = Finished()
    root = finished(tmp_path, "1", "a", failures=[])
    assert known.find(tmp_path, "a", "warm") == Layout(root)
    read = []
    monkeypatch.setattr(points, "read_json", read.append)
    assert known.find(tmp_path, "a", "warm") == Layout(root)
    assert read == []


def test_of_runs_begun_in_one_second_the_later_one_is_taken(tmp_path):
    later = finished(tmp_path, "20260101T000000Z-aaaaaa", "a", failures=[])
    earlier = finished(tmp_path, "20260101T000000Z-ffffff", "a", failures=[])
    for nanoseconds, root in enumerate((earlier, later)):
        os.utime(Layout(root).plan, ns=(nanoseconds, nanoseconds))
    assert Finished().find(tmp_path, "a", "warm") == Layout(later)
