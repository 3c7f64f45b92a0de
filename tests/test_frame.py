"""What a user holds: the tidy frame is the records exactly, and compare names the rank."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import harness
from harness import columns, compare, load, parquet, record
from harness.columns import encodable
from harness.errors import RecordError, UsageError
from harness.plan import ArmPlan, Layout, Plan, write_text
from harness.tables import Tables

ROOT = Path(__file__).parents[1]
Record = tuple[int, int, str, Mapping[str, Any]]
"""(repeat, step, phase, metrics)."""


def make(
    root: Path,
    arms: Mapping[str, Sequence[Sequence[Record]]],
    *,
    run: str = "r1",
    scenario: str = "case",
) -> Layout:
    """Write a run: for each arm, one sequence of records per rank."""
    layout = Layout(root)
    plan = Plan(
        run_id=run,
        scenario=scenario,
        params={},
        arms=tuple(
            ArmPlan(name=arm, ranks=len(ranks), repeats=1, isolated=False)
            for arm, ranks in arms.items()
        ),
        world_size=2,
        device="cpu",
        backend="gloo",
        seed=0,
        engine="warm",
        collective_timeout_s=1.0,
        arm_timeout_s=1.0,
    )
    write_text(layout.plan, plan.to_json())
    for arm, ranks in arms.items():
        for rank, records in enumerate(ranks):
            header = record.Header(
                run=run, scenario=scenario, arm=arm, rank=rank, world_size=len(ranks)
            )
            writer = record.Writer(layout, header)
            for repeat, step, phase, metrics in records:
                writer.write(metrics, repeat=repeat, step=step, phase=phase)
            writer.end("completed")
    return layout


def one(metrics: Mapping[str, Any], *, step: int = 0, phase: str = "") -> list[Record]:
    return [(0, step, phase, metrics)]


def column(df: pd.DataFrame, name: str) -> list[Any]:
    return [None if pd.isna(cell) else cell for cell in df[name]]


# A high surrogate before a low one would be read back as the character of the two.
texts = st.text(st.characters(codec=None), max_size=6).filter(
    lambda text: not any("\ud800" <= c <= "\udbff" for c in text[:-1])
)
values = st.one_of(
    st.floats(), st.booleans(), st.none(), texts, st.integers(-(10**310), 10**310),
    st.integers(2**53 - 3, 2**53 + 3),
)  # fmt: skip
records = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 99),
        texts,
        st.dictionaries(texts, values, max_size=4),
    ),
    max_size=4,
)


def expected(value: Any) -> tuple[float, str | None]:
    """Return the cells `value` and `text` that the frame's documentation promises."""
    if value is None or isinstance(value, str):
        text = "null" if value is None else value
        return math.nan, text.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return value, None
    if abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf, str(value)
    return float(value), None if int(float(value)) == value else str(value)


@given(st.lists(records, min_size=1, max_size=3), st.booleans())
@settings(deadline=None)
def test_the_frame_is_the_records_exactly_from_parquet_and_from_streams(ranks, compact):
    with tempfile.TemporaryDirectory() as name:
        layout = make(Path(name), {"faulty": ranks})
        tables = Tables.read(layout)
        if compact:
            assert parquet.write(layout, tables)
            for rank in range(len(ranks)):
                layout.stream("faulty", rank).unlink()
        df = load(name)
        want = [
            (rank, repeat, step, encodable(phase), encodable(metric), *expected(value), row.time)
            for rank, sequence in enumerate(ranks)
            for (repeat, step, phase, metrics), row in zip(
                sequence, tables.stream("faulty", rank).rows, strict=True
            )
            for metric, value in metrics.items()
        ]
    keys = ("rank", "repeat", "step", "phase", "metric", "text", "time")
    got = list(zip(*(column(df, key) for key in keys), strict=True))
    assert got == [(*row[:5], *row[6:]) for row in want]
    np.testing.assert_array_equal(
        df["value"].to_numpy().view(np.int64)[~df["value"].isna()],
        np.array([row[5] for row in want], np.float64).view(np.int64)[~df["value"].isna()],
    )
    assert df["value"].isna().tolist() == [math.isnan(row[5]) for row in want]
    assert set(df["run"]) | {"r1"} == {"r1"}
    assert set(df["scenario"]) | {"case"} == {"case"}
    assert set(df["arm"]) | {"faulty"} == {"faulty"}


def test_both_sources_give_the_same_dtypes_and_categories(tmp_path):
    ranks = [one({"loss": 0.5, "w.digest": "ab", "n": 3, "flag": True, "gone": None})] * 2
    layout = make(tmp_path, {"reference": ranks[:1], "faulty": ranks})
    from_streams = load(tmp_path)
    parquet.write(layout, Tables.read(layout))
    from_parquet = load(tmp_path)
    pd.testing.assert_frame_equal(from_streams, from_parquet)
    assert [from_streams[c].dtype.name for c in ("repeat", "rank", "step", "value", "time")] == [
        "int32", "int32", "int64", "float64", "float64",
    ]  # fmt: skip
    for name in ("run", "scenario", "arm", "phase", "metric"):
        assert from_streams[name].dtype == "category"
    assert list(from_parquet.columns) == [
        "run", "scenario", "arm", "repeat", "rank", "step", "phase", "metric", "value", "text",
        "time",
    ]  # fmt: skip
    for df in (from_streams, from_parquet):
        df.loc[0, "value"] = 7.0
        df.loc[0, "step"] = 9
        assert (df["value"][0], df["step"][0]) == (7.0, 9)


def test_nan_null_and_text_can_be_told_apart(tmp_path):
    make(tmp_path, {"faulty": [one({"nan": math.nan, "null": None, "text": "x", "inf": math.inf})]})
    df = load(tmp_path).set_index("metric")
    assert df["value"].isna().to_dict() == {"nan": True, "null": True, "text": True, "inf": False}
    assert column(df, "text") == [None, "null", "x", None]
    assert df["value"]["inf"] == math.inf


def test_a_killed_rank_is_there_up_to_its_last_whole_record(tmp_path):
    rows = [(0, step, "", {"loss": float(step)}) for step in range(5)]
    layout = make(tmp_path, {"faulty": [rows, rows, rows]})
    stream = layout.stream("faulty", 1)
    lines = stream.read_bytes().splitlines(keepends=True)
    stream.write_bytes(b"".join(lines[:4]) + lines[4][:-7])
    layout.stream("faulty", 2).write_bytes(lines[0][:20])
    from_streams = load(tmp_path)
    assert from_streams.groupby("rank").size().to_dict() == {0: 5, 1: 3}
    assert from_streams.query("rank == 1")["value"].tolist() == [0.0, 1.0, 2.0]
    parquet.write(layout, Tables.read(layout))
    pd.testing.assert_frame_equal(load(tmp_path), from_streams)


def test_parquet_of_other_streams_than_those_that_are_there_is_not_believed(tmp_path):
    rows = one({"loss": 1.0})
    layout = make(tmp_path, {"faulty": [rows, rows]})
    hidden = layout.stream("faulty", 1).rename(tmp_path / "hidden")
    parquet.write(layout, Tables.read(layout))
    assert len(load(tmp_path)) == 1
    hidden.rename(layout.stream("faulty", 1))
    assert len(load(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign"])
def test_damaged_parquet_falls_back_to_the_streams(tmp_path, damage):
    layout = make(tmp_path, {"faulty": [one({"loss": 1.0})]})
    parquet.write(layout, Tables.read(layout))
    data = layout.parquet.read_bytes()
    if damage == "foreign":
        pd.DataFrame({"a": [1]}).to_parquet(layout.parquet)
    else:
        layout.parquet.write_bytes(data[:-30] if damage == "cut" else b"")
    assert load(tmp_path)["value"].tolist() == [1.0]


def test_a_damaged_stream_is_an_error_that_names_it(tmp_path):
    layout = make(tmp_path, {"faulty": [one({"loss": 1.0})]})
    stream = layout.stream("faulty", 0)
    stream.write_bytes(stream.read_bytes().replace(b'"m":{', b'"m":['))
    with pytest.raises(RecordError, match=r"rank0\.jsonl:2: damaged"):
        load(tmp_path)


def test_records_of_another_run_are_refused(tmp_path):
    layout = make(tmp_path / "a", {"faulty": [one({"loss": 1.0})]}, run="r1")
    other = make(tmp_path / "b", {"faulty": [one({"loss": 1.0})]}, run="r2")
    other.stream("faulty", 0).replace(layout.stream("faulty", 0))
    with pytest.raises(RecordError, match=r"run r2.* run r1"):
        load(layout.root)


@pytest.mark.parametrize("pending", [0, 1, 3, 1000])
def test_packing_values_in_pieces_changes_nothing(tmp_path, monkeypatch, pending):
    rows = [
        (0, step, "", {"x": step / 7, "d": f"{step}", "n": None if step % 2 else 2**60 + step})
        for step in range(9)
    ]
    make(tmp_path, {"faulty": [rows]})
    monkeypatch.setattr(columns, "PENDING", pending)
    df = load(tmp_path)
    got = {name: column(df[df["metric"] == name], "text") for name in ("x", "d", "n")}
    assert got == {
        "x": [None] * 9,
        "d": [str(step) for step in range(9)],
        "n": ["null" if step % 2 else expected(2**60 + step)[1] for step in range(9)],
    }
    assert df[df["metric"] == "x"]["value"].tolist() == [step / 7 for step in range(9)]


def test_what_is_no_number_text_or_null_is_refused(tmp_path):
    make(tmp_path, {"faulty": [one({"loss": [1.0]})]})
    with pytest.raises(RecordError, match=r"\[1\.0\]"):
        load(tmp_path)


def test_a_run_without_records_is_an_empty_frame_of_the_same_columns(tmp_path):
    make(tmp_path / "a", {"faulty": [[]]})
    full = make(tmp_path / "b", {"faulty": [one({"loss": 1.0})]})
    empty = load(tmp_path / "a")
    assert len(empty) == 0
    assert empty.dtypes.astype(str).to_dict() == load(full.root).dtypes.astype(str).to_dict()
    assert len(compare(empty)) == 0
    assert list(compare(empty).columns) == list(compare(load(full.root)).columns)


def test_many_runs_are_one_frame_with_their_own_categories_united(tmp_path):
    first = make(tmp_path / "a" / "r1", {"faulty": [one({"x": 1.0})]}, run="r1", scenario="a")
    make(tmp_path / "a" / "r2", {"fixed": [one({"y": 2.0})]}, run="r2", scenario="a")
    make(tmp_path / "b" / "r3", {"faulty": [one({"y": 3.0})]}, run="r3", scenario="b")
    parquet.write(first, Tables.read(first))
    (tmp_path / "a" / "latest").symlink_to("r2")
    (tmp_path / "note.txt").write_text("not a run")
    df = load(tmp_path)
    assert list(
        zip(df["scenario"], df["run"], df["arm"], df["metric"], df["value"], strict=True)
    ) == [
        ("a", "r1", "faulty", "x", 1.0),
        ("a", "r2", "fixed", "y", 2.0),
        ("b", "r3", "faulty", "y", 3.0),
    ]
    assert all(df[name].dtype == "category" for name in ("run", "scenario", "arm", "metric"))
    assert df.index.tolist() == [0, 1, 2]
    assert set(load(tmp_path / "a")["run"]) == {"r1", "r2"}
    assert set(load(tmp_path / "a" / "latest")["run"]) == {"r2"}


def test_a_path_that_is_not_there_names_the_nearest_ones(tmp_path):
    make(tmp_path / "syncbn_clip" / "r1", {"faulty": [one({"x": 1.0})]})
    make(tmp_path / "other" / "r2", {"faulty": [one({"x": 1.0})]})
    with pytest.raises(UsageError) as raised:
        load(tmp_path / "sincbn_clip")
    message = str(raised.value)
    assert f"{tmp_path}/sincbn_clip does not exist; nearest: {tmp_path}/syncbn_clip" in message
    assert f"legal: {tmp_path}/other, {tmp_path}/syncbn_clip" in message
    with pytest.raises(UsageError, match="syncbn_clip/r1"):
        load(tmp_path / "syncbn_clip" / "r9" / "deeper")


def test_a_directory_without_runs_and_a_file_say_what_to_give(tmp_path):
    with pytest.raises(UsageError, match=r"no run in .*plan\.json"):
        load(tmp_path)
    layout = make(tmp_path / "r1", {"faulty": [one({"x": 1.0})]})
    with pytest.raises(UsageError, match="is a file, not a directory"):
        load(layout.plan)


def gap_of(tmp_path: Path, *ranks: Any) -> Any:
    """Return the one row that compare makes of one metric, one value per rank."""
    make(tmp_path, {"faulty": [one({"x": value}) for value in ranks]})
    table = compare(load(tmp_path))
    assert len(table) == 1
    return table.iloc[0]


def test_the_gap_of_numbers(tmp_path):
    row = gap_of(tmp_path, 2.0, -4.0, 3.0, -4.0)
    assert (row["min"], row["max"], row["gap"], row["relative"]) == (-4.0, 3.0, 7.0, 7.0 / 4.0)
    assert (row["argmin"], row["argmax"], row["ranks"], row["missing"]) == (1, 2, 4, 0)
    assert not row["equal"]
    assert row["odd"] is pd.NA


@pytest.mark.parametrize(
    ("ranks", "odd"),
    [
        (("a", "a", "b", "a"), 2),
        (("b", "a", "a", "a"), 0),
        (("a", "a", "a", "b"), 3),
        (("a", "b", "a"), 1),
        (("b", "a", "a"), 0),
        (("a", "b"), None),
        (("a", "b", "c"), None),
        (("a", "a", "b", "b"), None),
        (("a", "b", "b", "c"), None),
        ((1.0, 2.0, 1.0), 1),
        ((math.nan, math.nan, 1.0), 2),
        ((None, math.nan, math.nan), 0),
        ((1.0, "a", 1.0), 1),
        ((2**60, 2**60 + 1, 2**60), 1),
    ],
)
def test_the_odd_one_out(tmp_path, ranks, odd):
    row = gap_of(tmp_path, *ranks)
    assert not row["equal"]
    assert (None if row["odd"] is pd.NA else row["odd"]) == odd


@pytest.mark.parametrize(
    "ranks",
    [("a", "a", "a"), (1.5, 1.5), (math.nan, math.nan), (math.inf, math.inf), (None, None), (1.0,)],
)
def test_what_is_the_same_everywhere_is_equal_and_nobody_is_odd(tmp_path, ranks):
    row = gap_of(tmp_path, *ranks)
    assert row["equal"]
    assert row["odd"] is pd.NA
    finite = isinstance(ranks[0], float) and not math.isnan(ranks[0])
    assert (row["gap"] == 0.0) if finite else math.isnan(row["gap"])


def test_nan_beside_numbers_is_no_gap_that_could_be_mistaken_for_small(tmp_path):
    row = gap_of(tmp_path, 1.0, math.nan, 3.0)
    assert math.isnan(row["gap"])
    assert math.isnan(row["relative"])
    assert (row["min"], row["max"], row["argmin"], row["argmax"]) == (1.0, 3.0, 0, 2)
    assert not row["equal"]


def test_an_infinity_beside_numbers_is_an_infinite_gap(tmp_path):
    assert gap_of(tmp_path, 1.0, -math.inf)["gap"] == math.inf


def test_text_has_no_gap(tmp_path):
    row = gap_of(tmp_path, "a", "b")
    assert math.isnan(row["gap"])
    assert row["argmin"] is pd.NA


def test_a_rank_that_recorded_nothing_is_counted_as_missing(tmp_path):
    both = one({"x": 1.0}) + one({"x": 1.0}, step=1)
    make(tmp_path, {"faulty": [both, both[:1], both], "reference": [both]})
    table = compare(load(tmp_path)).set_index(["arm", "step"])[["ranks", "missing", "equal"]]
    assert table.T.to_dict("list") == {
        ("faulty", 0): [3, 0, True],
        ("faulty", 1): [2, 1, True],
        ("reference", 0): [1, 0, True],
        ("reference", 1): [1, 0, True],
    }


def test_moments_are_kept_apart_and_in_order_and_the_last_record_of_a_moment_counts(tmp_path):
    def rank(offset: float) -> list[Record]:
        return [
            (0, 1, "b", {"x": 9.0}),
            (0, 1, "b", {"x": 1.0 + offset}),
            (0, 1, "a", {"x": 2.0 + 2 * offset, "y": 0.0}),
            (1, 1, "b", {"x": 3.0 + 3 * offset}),
            (0, 0, "b", {"x": 4.0 + 4 * offset}),
        ]

    make(tmp_path, {"faulty": [rank(0.0), rank(1.0)]})
    df = load(tmp_path)
    table = compare(df)
    cells = ["repeat", "step", "phase", "metric", "gap"]
    want = [
        (0, 1, "b", "x", 1.0),
        (0, 1, "a", "x", 2.0),
        (0, 1, "a", "y", 0.0),
        (1, 1, "b", "x", 3.0),
        (0, 0, "b", "x", 4.0),
    ]
    assert list(table[cells].itertuples(index=False, name=None)) == want
    shuffled = compare(df[df["step"] == 1].query("metric == 'x'"))
    assert list(shuffled[cells].itertuples(index=False, name=None)) == [want[0], want[1], want[3]]


def test_compare_says_which_columns_it_lacks(tmp_path):
    make(tmp_path, {"faulty": [one({"x": 1.0})]})
    with pytest.raises(UsageError, match="no arm, rank"):
        compare(load(tmp_path).drop(columns=["arm", "rank"]))


def test_importing_harness_imports_no_pandas_and_compaction_neither(tmp_path):
    make(tmp_path, {"faulty": [one({"x": 1.0, "d": "ab"})]})
    code = (
        "import sys, harness\n"
        "from harness import parquet\n"
        "from harness.plan import Layout\n"
        "from harness.tables import Tables\n"
        "from pathlib import Path\n"
        "assert not {'pandas', 'pyarrow', 'numpy'} & set(sys.modules) - {'numpy'}\n"
        f"layout = Layout(Path({str(tmp_path)!r}))\n"
        "assert parquet.write(layout, Tables.read(layout))\n"
        "assert 'pyarrow' in sys.modules and 'pandas' not in sys.modules\n"
        "from harness import load\n"
        "assert 'pandas' in sys.modules and len(load(layout.root)) == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        harness.laod  # noqa: B018


def test_without_pyarrow_there_is_no_parquet_and_the_frame_is_the_same(tmp_path):
    layout = make(tmp_path, {"faulty": [one({"x": 1.0, "d": "ab", "n": None})]})
    code = (
        "import sys; sys.modules['pyarrow'] = None; sys.modules['pyarrow.parquet'] = None\n"
        "from harness import load, parquet\n"
        "from harness.plan import Layout\n"
        "from harness.tables import Tables\n"
        "from pathlib import Path\n"
        f"layout = Layout(Path({str(tmp_path)!r}))\n"
        "assert parquet.write(layout, Tables.read(layout)) is False\n"
        "df = load(layout.root)\n"
        "print(df['value'].tolist(), df['text'].dropna().to_dict())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    assert done.stdout.decode() == "[1.0, nan, nan] {1: 'ab', 2: 'null'}\n"
    assert not layout.parquet.exists()


def test_without_pandas_the_message_says_what_to_install():
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "from harness.errors import PrerequisiteError\n"
        "try:\n    from harness import load\n"
        "except PrerequisiteError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    assert b"pip install pandas" in done.stdout


def test_parquet_is_written_whole_or_not_at_all(tmp_path):
    layout = make(tmp_path, {"faulty": [[(0, s, "", {"x": s / 3}) for s in range(3000)]]})
    code = (
        "import resource\n"
        "from harness import parquet\n"
        "from harness.errors import RecordError\n"
        "from harness.plan import Layout\n"
        "from harness.tables import Tables\n"
        "from pathlib import Path\n"
        f"layout = Layout(Path({str(tmp_path)!r}))\n"
        "tables = Tables.read(layout)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "try: parquet.write(layout, tables)\n"
        "except RecordError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    assert f"cannot write {layout.parquet}: " in done.stdout.decode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "records"]
