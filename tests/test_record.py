"""The record stream: nothing before a cut is lost, nothing is invented, every value is exact."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import record
from harness.errors import RecordError
from harness.plan import Layout

HEADER = record.Header(run="r1", scenario="case", arm="faulty", rank=0, world_size=2)
READ = replace(HEADER, pid=os.getpid())
"""The header as it comes back: the writer adds its process."""
ROOT = Path(__file__).parents[1]


def is_pair(text: str) -> bool:
    """Say whether two lone surrogates stand side by side as if they were one character."""
    return any(
        "\ud800" <= a <= "\udbff" and "\udc00" <= b <= "\udfff" for a, b in itertools.pairwise(text)
    )


texts = st.text(st.characters(codec=None), max_size=12).filter(lambda text: not is_pair(text))
values = st.one_of(
    st.floats(),
    st.sampled_from([-0.0, 5e-324, -5e-324, 2.0**-1022, 1.7976931348623157e308, math.pi]),
    st.integers(-(10**400), 10**400),
    st.booleans(),
    st.none(),
    texts,
)
rows = st.tuples(
    st.dictionaries(texts, values, max_size=6),
    st.integers(0, 50),
    st.integers(-(2**62), 2**62),
    texts,
)


def bits(value: Any) -> Any:
    """Return what two values must share to be the same record: type and bits."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    return type(value).__name__, value


def exact(metrics: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, bits(value)) for name, value in metrics.items()]


def write_all(layout: Layout, sequence: list[Any], *, end: str | None = "completed") -> list[int]:
    """Write a stream and return the size of the file after the header and after each record."""
    writer = record.Writer(layout, HEADER)
    path = layout.stream("faulty", 0)
    sizes = [path.stat().st_size]
    for metrics, repeat, step, phase in sequence:
        writer.write(metrics, repeat=repeat, step=step, phase=phase)
        sizes.append(path.stat().st_size)
    if end:
        writer.end(end)
    else:
        writer.close()
    return sizes


def test_a_stream_of_no_record_still_says_whose_it_is(tmp_path):
    write_all(Layout(tmp_path), [], end=None)
    stream = record.read(Layout(tmp_path), "faulty", 0)
    assert stream is not None
    assert (stream.header, stream.rows, stream.end, stream.torn) == (READ, [], None, False)


@given(st.lists(rows, max_size=8))
@settings(deadline=None)
def test_every_value_comes_back_as_it_went_in(sequence):
    with tempfile.TemporaryDirectory() as name:
        layout = Layout(Path(name))
        write_all(layout, sequence)
        stream = record.read(layout, "faulty", 0)
    assert stream is not None
    assert (stream.header, stream.end, stream.torn) == (READ, "completed", False)
    assert [(row.repeat, row.step, row.phase) for row in stream.rows] == [
        (repeat, step, phase) for _, repeat, step, phase in sequence
    ]
    for row, (metrics, *_) in zip(stream.rows, sequence, strict=True):
        assert exact(row.metrics) == exact(metrics)
    times = [row.time for row in stream.rows]
    assert times == sorted(times)


@given(st.lists(rows, max_size=5), st.integers(0, 2**30))
@settings(max_examples=200, deadline=None)
def test_cut_at_any_byte_everything_before_the_cut_is_there_and_nothing_else(sequence, where):
    with tempfile.TemporaryDirectory() as name:
        layout = Layout(Path(name))
        sizes = write_all(layout, sequence)
        path = layout.stream("faulty", 0)
        whole = path.read_bytes()
        cut = where % (len(whole) + 1)
        path.write_bytes(whole[:cut])
        stream = record.read(layout, "faulty", 0)
    survived = sum(size <= cut for size in sizes)
    if survived == 0:
        assert stream is None
        return
    assert stream is not None
    assert [exact(row.metrics) for row in stream.rows] == [
        exact(metrics) for metrics, *_ in sequence[: survived - 1]
    ]
    assert stream.end == ("completed" if cut == len(whole) else None)
    assert stream.torn == (cut not in [*sizes, len(whole)])


def test_every_single_byte_of_a_small_stream_can_be_the_last(tmp_path):
    layout = Layout(tmp_path)
    sequence = [({"x": float(i), "d": "é\n", "n": math.nan}, 0, i, "p") for i in range(4)]
    sizes = write_all(layout, sequence)
    path = layout.stream("faulty", 0)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        stream = record.read(layout, "faulty", 0)
        assert (0 if stream is None else len(stream.rows) + 1) == sum(s <= cut for s in sizes)


@given(
    st.integers(0, 6),
    st.one_of(
        st.binary(min_size=1, max_size=40).filter(lambda junk: b"\n" not in junk),
        st.sampled_from(
            [b"", b"{}", b"1,2", b"null", b'"end"', b"[" * 10_000, b'{"repeat":0', b"{},{}",
             b'{"repeat":0,"step":1,"phase":"","t":0.0,"m":[1]}',
             b'{"repeat":"0","step":1,"phase":"","t":0.0,"m":{}}',
             b'{"repeat":0,"step":1,"phase":"","t":0.0,"m":{},"s":{"w":[-1,4]}}',
             b'{"repeat":0,"step":1,"phase":"","t":0.0,"m":{}}{}']
        ),
    ),
)  # fmt: skip
@settings(deadline=None)
def test_garbage_in_the_middle_is_an_error_that_names_file_and_line(at, junk):
    with tempfile.TemporaryDirectory() as name:
        layout = Layout(Path(name))
        write_all(layout, [({"x": 1.0}, 0, step, "") for step in range(6)], end=None)
        path = layout.stream("faulty", 0)
        lines = path.read_bytes().split(b"\n")
        lines.insert(at, junk)
        path.write_bytes(b"\n".join(lines))
        with pytest.raises(RecordError, match=f"rank0.jsonl:{at + 1}: damaged record"):
            record.read(layout, "faulty", 0)


def test_two_lines_that_are_wrong_alone_but_right_together_are_damaged(tmp_path):
    layout = Layout(tmp_path)
    write_all(layout, [], end=None)
    with layout.stream("faulty", 0).open("ab") as file:
        file.write(b'{"repeat":0\n"step":1,"phase":"","t":0.0,"m":{}}\n')
    with pytest.raises(RecordError, match=r"rank0\.jsonl:2: damaged"):
        record.read(layout, "faulty", 0)


def test_the_line_named_is_right_beyond_the_first_block(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "BLOCK", 256)
    layout = Layout(tmp_path)
    write_all(layout, [({"x": float(step)}, 0, step, "") for step in range(100)])
    stream = record.read(layout, "faulty", 0)
    assert stream is not None
    assert [row.metrics["x"] for row in stream.rows] == [float(step) for step in range(100)]
    path = layout.stream("faulty", 0)
    lines = path.read_bytes().split(b"\n")
    lines[77] = lines[77][:-1]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(RecordError, match=r"rank0\.jsonl:78: damaged"):
        record.read(layout, "faulty", 0)


def test_a_stream_without_its_header_is_damaged(tmp_path):
    layout = Layout(tmp_path)
    write_all(layout, [({"x": 1.0}, 0, 0, "")])
    path = layout.stream("faulty", 0)
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    with pytest.raises(RecordError, match=r"rank0\.jsonl:1: .*no header"):
        record.read(layout, "faulty", 0)


def test_a_line_after_the_end_is_damaged(tmp_path):
    layout = Layout(tmp_path)
    write_all(layout, [({"x": 1.0}, 0, 0, "")])
    with layout.stream("faulty", 0).open("ab") as file:
        file.write(b'{"repeat":0,"step":1,"phase":"","t":0.0,"m":{}}\n')
    with pytest.raises(RecordError, match=r"rank0\.jsonl:4: .*after the end"):
        record.read(layout, "faulty", 0)


def test_another_schema_is_refused_by_name(tmp_path):
    layout = Layout(tmp_path)
    write_all(layout, [])
    path = layout.stream("faulty", 0)
    path.write_bytes(path.read_bytes().replace(b'"schema":1', b'"schema":2'))
    with pytest.raises(RecordError, match=r"rank0.jsonl has schema 2, .* reads schema 1"):
        record.read(layout, "faulty", 0)


def test_a_second_writer_of_the_same_stream_is_refused_and_harms_nothing(tmp_path):
    layout = Layout(tmp_path)
    first = record.Writer(layout, HEADER)
    with pytest.raises(RecordError, match=r"rank0\.jsonl: File exists"):
        record.Writer(layout, HEADER)
    first.write({"x": 1.0}, repeat=0, step=0)
    first.end("completed")
    stream = record.read(layout, "faulty", 0)
    assert stream is not None
    assert (len(stream.rows), stream.end) == (1, "completed")


def test_the_end_carries_what_the_rank_raised(tmp_path):
    layout = Layout(tmp_path)
    writer = record.Writer(layout, HEADER)
    writer.end("failed", "ValueError: lr")
    stream = record.read(layout, "faulty", 0)
    assert stream is not None
    assert (stream.end, stream.error) == ("failed", "ValueError: lr")
    with pytest.raises(RecordError, match="closed"):
        writer.write({"x": 1.0}, repeat=0, step=0)


@given(st.lists(st.lists(st.floats(width=64), max_size=40), min_size=1, max_size=5))
@settings(deadline=None)
def test_snapshots_come_back_bit_for_bit(tensors):
    with tempfile.TemporaryDirectory() as name:
        layout = Layout(Path(name))
        writer = record.Writer(layout, HEADER)
        for step, tensor in enumerate(tensors):
            halves = {"w": array("d", tensor), "b": array("d", tensor[::-1])}
            writer.write({}, repeat=0, step=step, tensors=halves)
        writer.end("completed")
        stream = record.read(layout, "faulty", 0)
        assert stream is not None
        for row, tensor in zip(stream.rows, tensors, strict=True):
            got = stream.snapshot(row.snapshots["w"]), stream.snapshot(row.snapshots["b"])
            assert got[0].tobytes() == array("d", tensor).tobytes()
            assert got[1].tobytes() == array("d", tensor[::-1]).tobytes()


def test_a_snapshot_that_is_not_all_there_is_an_error(tmp_path):
    layout = Layout(tmp_path)
    writer = record.Writer(layout, HEADER)
    writer.write({}, repeat=0, step=0, tensors={"w": array("d", [1.0, 2.0, 3.0])})
    writer.end("completed")
    tensors = layout.tensors("faulty", 0)
    tensors.write_bytes(tensors.read_bytes()[:-1])
    stream = record.read(layout, "faulty", 0)
    assert stream is not None
    with pytest.raises(RecordError, match=r"rank0\.f64 ends before value 3"):
        stream.snapshot(stream.rows[0].snapshots["w"])


def test_a_snapshot_takes_float64_only(tmp_path):
    writer = record.Writer(Layout(tmp_path), HEADER)
    with pytest.raises(TypeError, match="float64"):
        writer.write({}, repeat=0, step=0, tensors={"w": memoryview(array("f", [1.0]))})
    writer.close()


def child(code: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, **options
    )


OPEN = """
import os, sys
from array import array
from pathlib import Path
from harness import record
from harness.errors import RecordError
from harness.plan import Layout
header = record.Header(run="r1", scenario="case", arm="faulty", rank=0, world_size=2)
writer = record.Writer(Layout(Path(sys.argv[1])), header)
"""


def test_a_rank_killed_in_the_middle_of_writing_loses_nothing_it_had_written(tmp_path):
    writing = child(
        OPEN
        + """
for step in range(10**9):
    writer.write({"x": step / 3, "pad": "p" * 2000}, repeat=0, step=step,
                 tensors={"w": array("d", [step, -step])})
    os.write(1, b"%d\\n" % step)
""",
        str(tmp_path),
    )
    assert writing.stdout is not None
    said = [int(writing.stdout.readline()) for _ in range(200)]
    os.kill(writing.pid, signal.SIGKILL)
    said += [int(line) for line in writing.stdout.read().split(b"\n")[:-1]]
    assert writing.wait() == -signal.SIGKILL
    stream = record.read(Layout(tmp_path), "faulty", 0)
    assert stream is not None
    assert stream.end is None
    # It may have been killed between a record and saying so.
    assert len(stream.rows) - len(said) in (0, 1)
    for step, row in enumerate(stream.rows):
        assert (row.step, row.metrics["x"]) == (step, step / 3)
        assert stream.snapshot(row.snapshots["w"]).tolist() == [step, -step]


@pytest.mark.parametrize("what", ["stream", "tensors"])
def test_a_full_disk_is_an_error_that_names_the_file_and_keeps_what_was_there(tmp_path, what):
    full = child(
        OPEN
        + """
tensors = {"w": array("d", [0.5] * 50)} if sys.argv[2] == "tensors" else None
try:
    for step in range(1000):
        writer.write({"x": step, "pad": "p" * 30}, repeat=0, step=step, tensors=tensors)
        print("wrote", step)
except RecordError as error:
    print(error)
    try:
        writer.end("failed", "disk full")
    except RecordError:
        print("no room for the last line")
""",
        str(tmp_path),
        what,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000)),
    )
    said = full.communicate()[0].decode().splitlines()
    assert full.returncode == 0
    wrote = sum(line.startswith("wrote") for line in said)
    file = "rank0.jsonl" if what == "stream" else "rank0.f64"
    assert f"cannot append to {tmp_path}/records/faulty/{file}: File too large" in said
    assert wrote > 5
    stream = record.read(Layout(tmp_path), "faulty", 0)
    assert stream is not None
    assert [row.metrics["x"] for row in stream.rows] == list(range(wrote))
    assert stream.torn is False
    assert stream.end == (None if "no room for the last line" in said else "failed")
    if what == "tensors":
        assert (stream.end, stream.error) == ("failed", "disk full")
        assert all(stream.snapshot(row.snapshots["w"]).sum() == 25.0 for row in stream.rows)


def test_a_device_without_space_is_an_error_and_closes_the_stream(tmp_path):
    layout = Layout(tmp_path)
    writer = record.Writer(layout, HEADER)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._lines._file)
    os.close(full)
    with pytest.raises(RecordError, match=r"rank0\.jsonl: No space left on device"):
        writer.write({"x": 1.0}, repeat=0, step=0)
    # /dev/full cannot be cut back, so nothing may follow.
    with pytest.raises(RecordError, match="closed"):
        writer.end("failed")


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "records").write_text("in the way")
    with pytest.raises(RecordError, match=r"cannot open .*rank0\.jsonl"):
        record.Writer(Layout(tmp_path), HEADER)


def test_one_record_is_one_line_of_plain_ascii_json(tmp_path):
    layout = Layout(tmp_path)
    write_all(layout, [({"é\n": "\udc80", "inf": math.inf}, 1, 2, "phase")])
    data = layout.stream("faulty", 0).read_bytes()
    assert data.isascii()
    header, line, end, rest = data.split(b"\n")
    assert json.loads(header)["schema"] == record.SCHEMA
    got = json.loads(line)
    del got["t"]
    assert got == {
        "repeat": 1,
        "step": 2,
        "phase": "phase",
        "m": {"é\n": "\udc80", "inf": math.inf},
    }
    assert (json.loads(end), rest) == ({"end": "completed"}, b"")
