"""The tidy tables of a sweep, CSV and Parquet: a row per point and arm, and per point and claim."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import RecordError
from harness.plan import write_text
from launch import loss

Row = Mapping[str, Any]
Columns = Mapping[str, type]

POINT: Columns = {
    "point": int,
    "state": str,
    "exit_code": int,
    "run": str,
    "reused": bool,
    "seconds": float,
    "problem": str,
}
"""What every row says about its point; the swept keys stand behind `point`."""
FINDING: Columns = {
    "claim": str,
    "kind": str,
    "expects": str,
    "outcome": str,
    "effect": float,
    "floor": float,
    "multiple": float,
    "unit": str,
    "reason": str,
}


def key_columns(points: Iterable[Mapping[str, Any]]) -> dict[str, type]:
    """Return the type of each swept key over all points: bool, int, float, or else text."""
    kinds: dict[str, set[type]] = {}
    for values in points:
        for key, value in values.items():
            kinds.setdefault(key, set()).add(type(value))
    return {key: _common(found) for key, found in kinds.items()}


def _common(kinds: set[type]) -> type:
    if len(kinds) == 1 and kinds <= {bool, int, float}:
        return next(iter(kinds))
    return float if kinds == {int, float} else str


def arms(keys: Columns) -> dict[str, type]:
    """Return the columns of the table of arms."""
    return {"point": int, **keys, **POINT, **loss.COLUMNS}


def findings(keys: Columns) -> dict[str, type]:
    """Return the columns of the table of findings."""
    named = ("point", "state", "exit_code", "run")
    return {"point": int, **keys, **{name: POINT[name] for name in named}, **FINDING}


def write(folder: Path, name: str, columns: Columns, rows: Sequence[Row]) -> None:
    """Write `<name>.csv` and, where there is pyarrow, `<name>.parquet`, each whole or not at all.

    Nothing at all is an empty cell in CSV and null in Parquet; not a number is `nan` and NaN.

    Raises:
        RecordError: if a file cannot be written; names it and why.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(key)) for key in columns])
    write_text(folder / f"{name}.csv", text.getvalue())
    _write_parquet(folder / f"{name}.parquet", columns, rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def _write_parquet(path: Path, columns: Columns, rows: Sequence[Row]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return
    types = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
    arrays = [pa.array([row.get(name) for row in rows], types[columns[name]]) for name in columns]
    table = pa.Table.from_arrays(arrays, names=list(columns))
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            pq.write_table(table, name)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from error
