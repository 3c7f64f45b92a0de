"""Per-rank append-only metric stream: one JSON object a line, nothing lost to a killed process.

Schema 1. The first line is the header; the others carry the repeat, the step, the phase, the
seconds since the header, `m` (metric name -> number, text, or null) and, for snapshots, `s`
(tensor name -> [offset, count] into the rank's file of raw float64 values). The last line of a
rank that came to its end is `{"end": ...}`. NaN and infinities stand as `NaN`, `Infinity`,
`-Infinity`, as Python's json writes and reads them. Every line is one `write` on a file opened
for appending, so a rank killed at any moment leaves whole lines and at most one torn last line;
what a full disk cut off is taken back, so that the lines after it can be read.

Every value comes back as it went in: floats to the last bit, ints of any size, texts with any
character. One exception, which is JSON's: two lone surrogates that happen to form a pair come
back as the character they encode.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.appending import Appending
from harness.errors import RecordError
from harness.plan import Layout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SCHEMA = 1
BLOCK = 1 << 20
"""Bytes read at a time: parsing some thousand lines in one call halves the time of one by one."""
Value = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Header:
    """Whose stream this is."""

    run: str
    scenario: str
    arm: str
    rank: int
    world_size: int
    pid: int = 0
    """Process that writes the stream; 0 in a header that was not read from a file."""
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record: everything a rank wrote at one moment."""

    repeat: int
    step: int
    phase: str
    time: float
    """Seconds since the stream was opened."""
    metrics: Mapping[str, Value]
    snapshots: Mapping[str, tuple[int, int]]
    """Tensor name -> (offset, count) in float64 values."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What could be read of one rank's stream."""

    header: Header
    rows: list[Row]
    end: str | None
    """"completed", "failed", or None: the rank never came to its end."""
    error: str | None
    """What the rank raised, if it came to a bad end by itself."""
    torn: bool
    """True if the last line was cut off; everything before it is in `rows`."""
    tensors: Path

    def snapshot(self, place: tuple[int, int]) -> npt.NDArray[np.float64]:
        """Return the values of a snapshot as a 1-d float64 array.

        Raises:
            RecordError: if the file holds fewer values than the stream says.
        """
        offset, count = place
        if offset + count > self._values.size:
            raise RecordError(f"{self.tensors} ends before value {offset + count}")
        return self._values[offset : offset + count]

    @cached_property
    def _values(self) -> npt.NDArray[np.float64]:
        import numpy as np

        try:
            return np.fromfile(self.tensors, dtype="<f8") if self.tensors.exists() else np.empty(0)
        except OSError as error:
            raise RecordError(f"cannot read {self.tensors}: {error.strerror}") from error


_encode = json.JSONEncoder(separators=(",", ":")).encode


class Writer:
    """Appends the records of one rank of one arm; stamps repeat, step, phase and time."""

    def __init__(self, layout: Layout, header: Header) -> None:
        """Open the stream and write its header.

        Raises:
            RecordError: if the directory or file cannot be made, or the stream exists already.
        """
        self._tensor_path = layout.tensors(header.arm, header.rank)
        self._tensors: Appending | None = None
        self._born = time.perf_counter()
        self._lines = Appending(layout.stream(header.arm, header.rank))
        try:
            self._put(
                {
                    "schema": header.schema,
                    "run": header.run,
                    "scenario": header.scenario,
                    "arm": header.arm,
                    "rank": header.rank,
                    "world_size": header.world_size,
                    "pid": os.getpid(),
                    "host": os.uname().nodename,
                    "unix_time": time.time(),
                }
            )
        except BaseException:
            self.close()
            raise

    def write(
        self,
        metrics: Mapping[str, Value],
        *,
        repeat: int,
        step: int,
        phase: str = "",
        tensors: Mapping[str, array[float] | memoryview] | None = None,
    ) -> None:
        """Append one record; `tensors` are float64 buffers, whose values go to the side file.

        Raises:
            RecordError: if the disk is full or gone, or the stream is closed.
        """
        line: dict[str, Any] = {
            "repeat": repeat,
            "step": step,
            "phase": phase,
            "t": round(time.perf_counter() - self._born, 6),
            "m": metrics,
        }
        if tensors:
            line["s"] = {name: self._put_tensor(values) for name, values in tensors.items()}
        self._put(line)

    def end(self, status: str, error: str | None = None) -> None:
        """Append the last line and close the stream.

        Raises:
            RecordError: if the disk is full or gone, or the stream is closed.
        """
        self._put({"end": status, "error": error} if error else {"end": status})
        self.close()

    def close(self) -> None:
        """Close without a last line: the stream then reads as one that was cut off."""
        self._lines.close()
        if self._tensors is not None:
            self._tensors.close()

    def _put(self, line: Mapping[str, Any]) -> None:
        self._lines.append(_encode(line).encode("ascii") + b"\n")

    def _put_tensor(self, values: array[float] | memoryview) -> tuple[int, int]:
        view = memoryview(values)
        if view.format != "d":
            raise TypeError(f"a snapshot takes float64 buffers (format d), not {view.format}")
        if self._tensors is None:
            self._tensors = Appending(self._tensor_path)
        place = (self._tensors.size // 8, view.nbytes // 8)
        if view.nbytes:
            self._tensors.append(view.cast("B"))
        return place


class Scan:
    """One pass over one stream: iterating yields the record lines as they stand in the file.

    The header is there once iteration has begun, the other fields once it is through.
    """

    def __init__(self, layout: Layout, arm: str, rank: int) -> None:
        """Take the place of the stream; nothing is read yet."""
        self.path = layout.stream(arm, rank)
        self.header: Header | None = None
        """None: the rank never opened the stream, or was killed in its first line."""
        self.end: str | None = None
        self.error: str | None = None
        self.torn = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the record lines: repeat, step, phase, t, m and perhaps s.

        Raises:
            RecordError: if a line other than the last is damaged, or the schema is another one.
        """
        number = 0
        for lines in self._blocks():
            for line in self._parse(lines, number):
                number += 1
                try:
                    record = self._take(line)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise self._damaged(number, error) from error
                if record is not None:
                    yield record

    def _blocks(self) -> Iterator[list[bytes]]:
        rest = b""
        try:
            with self.path.open("rb") as file:
                while block := file.read(BLOCK):
                    whole, newline, rest = (rest + block).rpartition(b"\n")
                    if newline:
                        yield whole.split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise RecordError(f"cannot read {self.path}: {error.strerror}") from error
        self.torn = bool(rest)

    def _parse(self, lines: list[bytes], before: int) -> list[Any]:
        try:
            parsed: list[Any] = json.loads(f"[{b','.join(lines).decode()}]")
        except (ValueError, RecursionError):
            parsed = []
        if len(parsed) == len(lines):
            return parsed
        return [self._parse_one(number, line) for number, line in enumerate(lines, before + 1)]

    def _parse_one(self, number: int, line: bytes) -> Any:
        try:
            return json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise self._damaged(number, error) from error

    def _take(self, line: dict[str, Any]) -> dict[str, Any] | None:
        if self.header is None:
            self._take_header(line)
            return None
        if self.end is not None:
            raise ValueError("a line after the end of the stream")
        if "end" in line:
            self.end, self.error = str(line["end"]), line.get("error")
            return None
        if not (
            type(line["repeat"]) is type(line["step"]) is int
            and type(line["phase"]) is str
            and type(line["t"]) in (float, int)
            and type(line["m"]) is dict
        ):
            raise ValueError("repeat, step, phase, t or m is of the wrong type")
        for offset, count in line.get("s", {}).values():
            if not (type(offset) is type(count) is int and offset >= 0 and count >= 0):
                raise ValueError("a snapshot has no place")
        return line

    def _take_header(self, line: dict[str, Any]) -> None:
        if "schema" not in line:
            raise ValueError("the first line is no header")
        if line["schema"] != SCHEMA:
            raise RecordError(
                f"{self.path} has schema {line['schema']}, this version reads schema {SCHEMA}; "
                "judge it with the version that wrote it (see environment.json)"
            )
        names = ("run", "scenario", "arm", "rank", "world_size", "pid")
        self.header = Header(**{name: line[name] for name in names})

    def _damaged(self, number: int, error: Exception) -> RecordError:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        return RecordError(f"{self.path}:{number}: damaged record ({why})")


def read(layout: Layout, arm: str, rank: int) -> Stream | None:
    """Read one rank's stream; None if the rank never opened it or was killed in its first line.

    Raises:
        RecordError: if a line other than the last is damaged, or the schema is another one.
    """
    scan = Scan(layout, arm, rank)
    rows = [
        Row(
            repeat=line["repeat"],
            step=line["step"],
            phase=line["phase"],
            time=line["t"],
            metrics=line["m"],
            snapshots={name: (at, count) for name, (at, count) in line.get("s", {}).items()},
        )
        for line in scan
    ]
    if scan.header is None:
        return None
    return Stream(
        header=scan.header,
        rows=rows,
        end=scan.end,
        error=scan.error,
        torn=scan.torn,
        tensors=layout.tensors(arm, rank),
    )
