"""All records of a run as one Parquet file, made by the parent after the run.

The record streams stay what counts: a file here is only faster to read, and says in its metadata
which streams of which size it was made from. Needs pyarrow and no pandas.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.columns import Builder, Category, Columns
from harness.errors import RecordError
from harness.plan import Layout, Plan
from harness.tables import Tables

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

SCHEMA = 1
KEY = b"crossrank"
"""Key of the metadata, a JSON object: schema and the size in bytes of each stream."""


def write(layout: Layout, tables: Tables) -> bool:
    """Write `records.parquet` whole or not at all; False, and no file, without pyarrow.

    Raises:
        RecordError: if the file cannot be written, or a record holds what no record may hold.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError:
        return False
    builder = Builder(run=tables.plan.run_id, scenario=tables.plan.scenario)
    for arm, rank, row in tables.rows():
        builder.add(
            arm,
            rank,
            repeat=row.repeat,
            step=row.step,
            phase=row.phase,
            time=row.time,
            metrics=row.metrics,
        )
    table = _table(builder.build(), sizes(layout, tables.plan))
    categories = [name for name in table.column_names if _is_category(table.schema.field(name))]
    try:
        handle, name = tempfile.mkstemp(dir=layout.root, prefix=f".{layout.parquet.name}.")
        os.close(handle)
        try:
            pq.write_table(table, name, use_dictionary=categories)
            Path(name).chmod(0o644)
            Path(name).replace(layout.parquet)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        why = error.strerror or error
        raise RecordError(f"cannot write {layout.parquet}: {why}") from error
    return True


def sizes(layout: Layout, plan: Plan) -> dict[str, int]:
    """Return the size in bytes of every stream that exists, by its path in the run directory."""
    found = {}
    for arm in plan.arms:
        for rank in range(arm.ranks):
            stream = layout.stream(arm.name, rank)
            with contextlib.suppress(FileNotFoundError):
                found[stream.relative_to(layout.root).as_posix()] = stream.stat().st_size
    return found


def read(layout: Layout, plan: Plan) -> pa.Table | None:
    """Return the table of a run; None unless a whole file of all its present streams is there.

    Streams that were deleted after compaction are not missed; one that has grown or appeared
    since makes the file incomplete.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return None
    try:
        with pq.ParquetFile(layout.parquet) as file:
            about = json.loads((file.schema_arrow.metadata or {}).get(KEY, b"{}"))
            if about.get("schema") != SCHEMA:
                return None
            if not sizes(layout, plan).items() <= about["streams"].items():
                return None
            return file.read()
    except (OSError, pa.ArrowException):
        return None


def _table(columns: Columns, streams: dict[str, int]) -> pa.Table:
    """Return the columns as an Arrow table.

    From buffers throughout: pyarrow's converters import pandas, which takes longer than all else.
    """
    import pyarrow as pa

    metadata = {KEY: json.dumps({"schema": SCHEMA, "streams": streams}).encode()}
    arrays = {name: _array(column) for name, column in vars(columns).items()}
    return pa.Table.from_arrays(
        list(arrays.values()),
        schema=pa.schema([pa.field(name, array.type) for name, array in arrays.items()], metadata),
    )


def _array(column: Any) -> pa.Array:
    import pyarrow as pa

    if isinstance(column, Category):
        return pa.DictionaryArray.from_arrays(_array(column.codes), _texts(column.names))
    if column.dtype == object:
        return _texts(column)
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(column.dtype), len(column), [None, pa.py_buffer(column)]
    )


def _texts(texts: Sequence[str | None] | npt.NDArray[np.object_]) -> pa.Array:
    import pyarrow as pa

    there = np.array([text is not None for text in texts], bool)
    encoded = [text.encode() for text in texts if text is not None]
    offsets = np.zeros(len(texts) + 1, np.int64)
    offsets[1:][there] = [len(text) for text in encoded]
    np.cumsum(offsets, out=offsets)
    buffers = [np.packbits(there, bitorder="little"), offsets, b"".join(encoded)]
    return pa.Array.from_buffers(
        pa.large_string(), len(texts), [pa.py_buffer(buffer) for buffer in buffers]
    )


def _is_category(field: pa.Field) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_dictionary(field.type))
