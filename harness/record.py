"""Per-rank append-only metric stream: one JSON object a line, nothing lost to a killed process.

Schema 1. The first line is the header; the others carry the repeat, the step, the phase, the
seconds since the header, `m` (metric name -> number, text, or null) and, for snapshots, `s`
(tensor name -> [offset, count] into the rank's file of raw float64 values). The last line of a
rank that came to its end is `{"end": ...}`. NaN and infinities stand as `NaN`, `Infinity`,
`-Infinity`, as Python's json writes and reads them. Every line is one `write` on a file opened
for appending, so a rank killed at any moment leaves whole lines and at most one torn last line.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import RecordError
from harness.plan import Layout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SCHEMA = 1
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
        import numpy as np

        offset, count = place
        try:
            values = np.fromfile(self.tensors, dtype="<f8", count=count, offset=8 * offset)
        except OSError as error:
            raise RecordError(f"cannot read {self.tensors}: {error.strerror}") from error
        if values.size != count:
            raise RecordError(f"{self.tensors} ends before value {offset + count}")
        return values


class Writer:
    """Appends the records of one rank of one arm; stamps repeat, step, phase and time."""

    def __init__(self, layout: Layout, header: Header) -> None:
        """Open the stream and write its header.

        Raises:
            RecordError: if the directory or file cannot be made, or the stream exists already.
        """
        self._path = layout.stream(header.arm, header.rank)
        self._tensor_path = layout.tensors(header.arm, header.rank)
        self._tensors: int | None = None
        self._offset = 0
        self._born = time.perf_counter()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, flags, 0o644)
        except OSError as error:
            raise RecordError(f"cannot open {self._path}: {error.strerror}") from error
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
            RecordError: if the disk is full or gone.
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
        """Append the last line and close the stream."""
        self._put({"end": status, "error": error} if error else {"end": status})
        self.close()

    def close(self) -> None:
        """Close without a last line: the stream then reads as one that was cut off."""
        for file in (self._file, self._tensors):
            if file is not None and file >= 0:
                os.close(file)
        self._file, self._tensors = -1, None

    def _put(self, line: Mapping[str, Any]) -> None:
        self._append(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _put_tensor(self, values: array[float] | memoryview) -> tuple[int, int]:
        data = memoryview(values).cast("B")
        if self._tensors is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
            try:
                self._tensors = os.open(self._tensor_path, flags, 0o644)
            except OSError as error:
                raise RecordError(f"cannot open {self._tensor_path}: {error.strerror}") from error
        self._append(self._tensors, data)
        place = (self._offset, len(data) // 8)
        self._offset += place[1]
        return place

    def _append(self, file: int, data: bytes | memoryview) -> None:
        try:
            written = os.write(file, data)
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError as error:
            raise RecordError(f"cannot append to {self._path}: {error.strerror}") from error


@dataclass
class _Parts:
    header: Header | None = None
    rows: list[Row] = field(default_factory=list)
    end: str | None = None
    error: str | None = None
    torn: bool = False


def read(layout: Layout, arm: str, rank: int) -> Stream | None:
    """Read one rank's stream; None if the rank never opened it or was killed in its first line.

    Raises:
        RecordError: if a line other than the last is damaged, or the schema is another one.
    """
    path = layout.stream(arm, rank)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    parts = _Parts()
    whole, newline, rest = data.rpartition(b"\n")
    parts.torn = bool(rest)
    for number, line in enumerate(_lines(whole) if newline else (), start=1):
        try:
            _take(json.loads(line), parts)
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path}:{number}: damaged record ({error})") from error
    if parts.header is None:
        return None
    return Stream(
        header=parts.header,
        rows=parts.rows,
        end=parts.end,
        error=parts.error,
        torn=parts.torn,
        tensors=layout.tensors(arm, rank),
    )


def _lines(data: bytes) -> Iterator[bytes]:
    return iter(data.split(b"\n"))


def _take(line: dict[str, Any], parts: _Parts) -> None:
    if "end" in line:
        parts.end, parts.error = line["end"], line.get("error")
    elif "schema" in line:
        if line["schema"] != SCHEMA:
            raise ValueError(f"schema {line['schema']}, this version reads {SCHEMA}")
        names = ("run", "scenario", "arm", "rank", "world_size", "pid")
        parts.header = Header(**{name: line[name] for name in names})
    else:
        parts.rows.append(
            Row(
                repeat=line["repeat"],
                step=line["step"],
                phase=line["phase"],
                time=line["t"],
                metrics=line["m"],
                snapshots={name: (at, n) for name, (at, n) in line.get("s", {}).items()},
            )
        )
