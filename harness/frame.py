"""What a user holds after a run: the records as one tidy pandas frame, and how far ranks differ.

    from harness import load, compare
    df = load("results/syncbn_clip")       # one run, all runs of a scenario, or all there are
    gap = compare(df)                      # one row per step and metric: the gap between ranks

The only module that imports pandas.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import parquet, record
from harness.columns import Builder, Category
from harness.errors import PrerequisiteError, RecordError, UsageError, did_you_mean
from harness.plan import Layout, Plan

try:
    import pandas as pd
except ImportError as error:
    raise PrerequisiteError(
        "load and compare need pandas, which is not installed\ntype: pip install pandas pyarrow"
    ) from error

if TYPE_CHECKING:
    import numpy.typing as npt

CATEGORIES = ("run", "scenario", "arm", "phase", "metric")
MOMENT = ["run", "scenario", "arm", "repeat", "step", "phase", "metric"]
"""What one row of `compare` is about."""
TEXT: Any = "str" if int(pd.__version__.split(".")[0]) >= 3 else object
"""What pyarrow makes of texts under this pandas; by hand it has to come out the same."""
DEPTH = 3
"""How far below the given directory runs are looked for."""


def load(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Return everything recorded in a run, or in all runs below a directory.

    One row per recorded value, in the order in which each rank recorded it: run, scenario, arm,
    repeat, rank, step, phase, metric, value, text, time (seconds since the rank opened its
    stream). `value` is float64: True is 1, and a value that is no number is NaN. `text` is
    missing for numbers, a recorded NaN among them; it holds a text metric (a digest, a name),
    "null" for a recorded null, and the digits of an int that no float64 equals.

    Ranks that were killed are there up to their last whole record. Reads `records.parquet` where
    it is complete, else the streams: the frame is the same.

    Raises:
        UsageError: if there is no such directory, or no run in it.
        RecordError: if a stream is damaged elsewhere than in its last line.
    """
    root = Path(path)
    layouts = [Layout(run) for run in _runs(root, DEPTH)]
    if not layouts:
        raise UsageError(_nothing_at(root))
    return _concat([_load(layout) for layout in layouts])


def compare(df: pd.DataFrame) -> pd.DataFrame:
    """Return how far the ranks differ: one row per (run, arm, repeat, step, phase, metric).

    Columns beside these: `ranks` (how many recorded it) and `missing` (how many other ranks of
    that arm are in the frame: never read their silence as agreement); for numbers `min`, `max`,
    `gap` = max - min, `relative` = gap / max(|min|, |max|), and the lowest `argmin` and `argmax`
    rank; for everything `equal` (all that recorded it recorded the same; NaN equals NaN, 0.0
    equals -0.0) and `odd`, the one rank that differs where all others, two at least, agree.

    If NaN stands beside numbers, `gap` is NaN and `min`, `max` are those of the numbers. A rank
    that recorded a metric twice at one moment counts with the last value.

    Raises:
        UsageError: if the frame lacks columns of `load`.
    """
    needed = [*MOMENT, "rank", "value", "text"]
    if lacking := [name for name in needed if name not in df.columns]:
        raise UsageError(
            f"compare takes a frame of load(): this one has no {', '.join(lacking)}\n"
            f"legal: any selection of its rows with the columns {', '.join(needed)}"
        )
    group, rank = _number(df, MOMENT), df["rank"].to_numpy()
    order = np.lexsort((rank, group))
    # Sorting kept the order of recording, so of equal neighbours the last one counts.
    last = np.ones(len(order), bool)
    last[:-1] = (np.diff(group[order]) != 0) | (np.diff(rank[order]) != 0)
    order = order[last]
    df, group = df.iloc[order], group[order]
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    table = df.iloc[starts][MOMENT].reset_index(drop=True)
    ranks = np.diff(starts, append=len(df))
    row_of = np.repeat(np.arange(len(starts)), ranks)
    table["ranks"] = ranks
    table["missing"] = _planned(df)[starts] - ranks
    _add_numbers(table, df, starts, row_of)
    _add_agreement(table, df, starts, row_of)
    return table


def _add_numbers(
    table: pd.DataFrame,
    df: pd.DataFrame,
    starts: npt.NDArray[np.intp],
    row_of: npt.NDArray[np.intp],
) -> None:
    value = df["value"].to_numpy(np.float64)
    rank = df["rank"].to_numpy()
    if not len(value):
        low = high = nan = np.zeros(0)
    else:
        low, high = np.fmin.reduceat(value, starts), np.fmax.reduceat(value, starts)
        nan = np.logical_or.reduceat(np.isnan(value), starts)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        gap = np.where(low == high, 0.0, high - low)
        relative = np.where(gap == 0.0, 0.0, gap / np.maximum(np.abs(low), np.abs(high)))
    table["min"], table["max"] = low, high
    table["gap"] = np.where(nan, np.nan, gap)
    table["relative"] = np.where(nan, np.nan, relative)
    for name, extreme in (("argmin", low), ("argmax", high)):
        hits = value == extreme[row_of]
        rows, first = np.unique(row_of[hits], return_index=True)
        found = np.full(len(table), -1, np.int64)
        found[rows] = rank[hits][first]
        table[name] = _rank_or_missing(found)


def _add_agreement(
    table: pd.DataFrame,
    df: pd.DataFrame,
    starts: npt.NDArray[np.intp],
    row_of: npt.NDArray[np.intp],
) -> None:
    ranks = table["ranks"].to_numpy()
    value = pd.factorize(df["value"].to_numpy(np.float64))[0]
    text = pd.factorize(df["text"])[0]

    def differ(place: npt.NDArray[np.intp]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return which rows differ from the row at their group's place, and how many do."""
        at = place[row_of]
        rows = (value != value[at]) | (text != text[at])
        return rows, np.bincount(row_of[rows], minlength=len(starts))

    from_first, count = differ(starts)
    table["equal"] = count == 0
    odd = np.full(len(table), -1, np.int64)
    rank = df["rank"].to_numpy()
    one = from_first & (count == 1)[row_of] & (ranks >= 3)[row_of]
    odd[row_of[one]] = rank[one]
    # The first rank is the odd one if it alone differs from the second.
    _, count = differ(starts + (ranks > 1))
    first = (count == 1) & (ranks >= 3) & (odd < 0) & from_first[starts + (ranks > 1)]
    odd[first] = rank[starts[first]]
    table["odd"] = _rank_or_missing(odd)


def _rank_or_missing(rank: npt.NDArray[np.int64]) -> Any:
    return pd.arrays.IntegerArray(rank, rank < 0)


def _planned(df: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return, for each row, how many different ranks its arm has in the frame."""
    arm = _number(df, ["run", "scenario", "arm"])
    pairs = pd.DataFrame({"arm": arm, "rank": df["rank"].to_numpy()}).drop_duplicates()
    return np.bincount(pairs["arm"].to_numpy(), minlength=1)[arm].astype(np.int64)


def _number(df: pd.DataFrame, keys: list[str]) -> npt.NDArray[np.intp]:
    """Number the groups of equal keys in order of first appearance."""
    grouped = df.groupby(keys, observed=True, sort=False, dropna=False)
    return grouped.ngroup().to_numpy().astype(np.intp)


def _load(layout: Layout) -> pd.DataFrame:
    plan = Plan.read(layout.plan)
    table = parquet.read(layout, plan)
    if table is not None:
        frame: pd.DataFrame = table.to_pandas()
        return frame
    builder = Builder(run=plan.run_id, scenario=plan.scenario)
    for arm in plan.arms:
        for rank in range(arm.ranks):
            scan = record.Scan(layout, arm.name, rank)
            for line in scan:
                builder.add(
                    arm.name,
                    rank,
                    repeat=line["repeat"],
                    step=line["step"],
                    phase=line["phase"],
                    time=line["t"],
                    metrics=line["m"],
                )
            if scan.header and scan.header.run != plan.run_id:
                raise RecordError(
                    f"{scan.path} is a record of run {scan.header.run}, "
                    f"the plan beside it is of run {plan.run_id}"
                )
    columns = vars(builder.build())
    return pd.DataFrame({name: _series(column) for name, column in columns.items()}, copy=False)


def _series(column: Category | npt.NDArray[Any]) -> Any:
    if isinstance(column, Category):
        return pd.Categorical.from_codes(column.codes, pd.Index(list(column.names), dtype=TEXT))
    return pd.Series(column, dtype=TEXT) if column.dtype == object else column


def _concat(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return one frame of all rows; categories are united instead of lost."""
    if len(frames) == 1:
        return frames[0]
    data: dict[str, Any] = {}
    for name in frames[0].columns:
        parts = [frame[name] for frame in frames]
        data[name] = (
            pd.api.types.union_categoricals(parts)
            if name in CATEGORIES
            else pd.concat(parts, ignore_index=True)
        )
    return pd.DataFrame(data)


def _runs(root: Path, depth: int) -> Iterator[Path]:
    """Yield the run directories at or below `root`, sorted by name."""
    if Layout(root).plan.is_file():
        yield root
    elif depth and root.is_dir():
        for child in sorted(root.iterdir()):
            # A link to a run is that run over again.
            if child.is_dir() and not child.is_symlink():
                yield from _runs(child, depth - 1)


def _nothing_at(root: Path) -> str:
    """Say what is wrong with a path and which ones near it are right."""
    if root.is_dir():
        return (
            f"no run in {root}: neither it nor a directory below it holds a plan.json\n"
            "give the directory of a run, of a scenario's runs, or of all results"
        )
    near = root.parent
    while not near.is_dir() and near != near.parent:
        near = near.parent
    what = "is a file, not a directory" if root.exists() else "does not exist"
    legal = [str(child) for child in sorted(near.iterdir()) if any(_runs(child, DEPTH - 1))]
    if not legal:
        return f"{root} {what}, and {near} holds no runs"
    shown = legal[:10] + ([f"and {len(legal) - 10} more"] if len(legal) > 10 else [])
    return f"{root} {what}{did_you_mean(str(root), legal)}\nlegal: {', '.join(shown)}"
