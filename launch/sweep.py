"""Many configurations, one table: the points of a multirun, one after another on one warm server.

Each point is a run directory of its own. A point that fails is a row, not the end. A second call
runs only what is missing: a run of the same configuration, scenario source, torch and device that
came to a sound end is taken as it is.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, MissingRecord, RecordError
from harness.plan import Layout, write_text
from harness.report import terminal
from harness.scenario import Role, Scenario
from harness.tables import Tables
from launch import environment, runs
from launch.command import Point
from launch.config import Config
from launch.engine import Engine, Progress
from launch.reproduce import engine_for, place, point_key, reproduce

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What became of one point."""

    point: Point
    layout: Layout | None
    reused: bool
    problem: str | None


def run(points: Sequence[Point]) -> int:
    """Run what is missing, write the tables and the page; returns the exit code.

    The code is the gravest of the points': 10 unexpected, 11 inconclusive or failed, 0.
    """
    sound = [point.config for point in points if point.config is not None]
    if not sound:
        raise points[0].error or HarnessError("nothing to sweep")
    first = sound[0]
    out = terminal.console(quiet=first.quiet, stderr=first.json)
    swept = swept_keys([point.overrides for point in points])
    if first.dry_run:
        for point in points:
            out.print(" ".join(point.overrides), markup=False, soft_wrap=True)
        out.print(f"{len(points)} points over {', '.join(swept) or 'nothing'}")
        return 0
    out.print(f"sweep of {first.name}: {len(points)} points over {', '.join(swept) or 'nothing'}")
    engine = engine_for(first)
    finished = _finished(first.results, {config.name for config in sound})
    done: list[Done] = []
    try:
        with terminal.bar(out) as show:
            for number, point in enumerate(points):
                show(number, len(points), " ".join(point.overrides[1:]))
                done.append(_point(point, engine, finished))
    finally:
        engine.close()
        folder = sweep_folder(first, swept, points)
        code = _conclude(folder, first.scenario, swept, done, out) if done else 11
    if first.json:
        print(json.dumps(list(_rows(done, swept)), default=str))
    return code


def swept_keys(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return the keys whose value differs between points, in the order typed."""
    values: dict[str, set[str]] = {}
    for words in overrides:
        for word in words:
            key, _, value = word.partition("=")
            values.setdefault(key, set()).add(value)
    return [key for key, found in values.items() if len(found) > 1]


def sweep_folder(config: Config, swept: Sequence[str], points: Sequence[Point]) -> Path:
    """Return the directory of a sweep: the same command line finds the same one again."""
    text = json.dumps(sorted(point.overrides for point in points))
    name = f"{config.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return config.results.expanduser().absolute() / "sweeps" / name


def _point(point: Point, engine: Engine, finished: Mapping[str, Layout]) -> Done:
    if point.config is None:
        return Done(point=point, layout=None, reused=False, problem=str(point.error))
    config = point.config
    try:
        where = place(config)
        torch = environment.gather(where)["packages"]["torch"]
        found = finished.get(point_key(config, where, torch))
        if found:
            return Done(point=point, layout=found, reused=True, problem=None)
        result = reproduce(config, engine, where, started=_silent, changed=_silent)
    except HarnessError as error:
        return Done(point=point, layout=None, reused=False, problem=str(error))
    failures = "; ".join(result.verdict.failures)
    return Done(point=point, layout=result.layout, reused=False, problem=failures or None)


def _silent(what: object) -> None:
    """Say nothing: the sweep has a bar of its own."""


def _finished(results: Path, names: set[str]) -> dict[str, Layout]:
    """Return the soundly ended runs by point key; an unsound one has to run again."""
    found: dict[str, Layout] = {}
    for name in names:
        for path in sorted((results.expanduser() / name).glob("*/environment.json")):
            layout = Layout(path.parent.absolute())
            try:
                key = runs.read_json(path).get("point")
                verdict = runs.read_json(layout.verdict)
            except HarnessError:
                continue
            if key and not verdict.get("failures"):
                found[str(key)] = layout
    return found


def _conclude(
    folder: Path, scenario: Scenario, swept: Sequence[str], done: Sequence[Done], out: Any
) -> int:
    rows = list(_rows(done, swept))
    findings = list(_findings(done, swept))
    _write_csv(folder / "table.csv", rows)
    _write_csv(folder / "findings.csv", findings)
    for name, data in (("table.parquet", rows), ("findings.parquet", findings)):
        _write_parquet(folder / name, data)
    try:
        from harness.report import sweep as page

        page.write(folder / "sweep.html", scenario, swept, rows, findings)
    except HarnessError as error:
        out.print(f"note     {error}", markup=False)
    terminal.sweep(out, swept, rows)
    problems = [item for item in done if item.problem]
    for item in problems:
        words = " ".join(item.point.overrides)
        print(f"crossrank: {words}: {item.problem}", file=sys.stderr)
    reused = sum(item.reused for item in done)
    out.print(f"{len(done)} points: {len(done) - reused - len(problems)} run, {reused} as they were, "
              f"{len(problems)} failed")
    out.print(f"table    {folder / 'table.csv'}", style="dim", soft_wrap=True)
    out.print(f"page     {folder / 'sweep.html'}", style="dim", soft_wrap=True)
    codes = {row["exit_code"] for row in findings} | ({11} if problems else set())
    return 10 if 10 in codes else 11 if 11 in codes else 0


def _keys(item: Done, swept: Sequence[str]) -> Row:
    typed = dict(word.split("=", 1) for word in item.point.overrides if "=" in word)
    return {key: _value(typed.get(key)) for key in swept}


def _value(text: str | None) -> Any:
    if text is None:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _rows(done: Sequence[Done], swept: Sequence[str]) -> Iterator[Row]:
    """Yield one row per point and arm: the cross-rank loss gap, absolute and in floors."""
    for item in done:
        head = {**_keys(item, swept), "problem": item.problem or ""}
        if item.layout is None:
            yield head
            continue
        head |= {"run": item.layout.root.name, "reused": item.reused}
        try:
            tables = Tables.read(item.layout)
        except RecordError as error:
            yield {**head, "problem": str(error)}
            continue
        floor = loss_floor(tables, item.point.config)
        for arm in tables.plan.arms:
            gaps = loss_gaps(tables, arm.name)
            if not gaps:
                continue
            last = gaps[max(gaps)]
            yield {
                **head,
                "arm": arm.name,
                "role": item.point.config.scenario.arm(arm.name).role.value
                if item.point.config
                else "",
                "ranks": arm.ranks,
                "loss_gap_first": gaps[min(gaps)],
                "loss_gap_last": last,
                "loss_gap_max": max(gaps.values()),
                "loss_floor": floor,
                "loss_gap_in_floors": last / floor if floor else None,
            }


def loss_gaps(tables: Tables, arm: str) -> dict[int, float]:
    """Return step -> largest minus smallest loss over the ranks; empty if no loss was recorded."""
    try:
        series = [tables.series(arm, "loss", rank=rank) for rank in tables.ranks(arm)]
    except MissingRecord:
        return {}
    steps = set.intersection(*(set(found) for found in series))
    return {
        step: max(found[step] for found in series) - min(found[step] for found in series)
        for step in sorted(steps)
    }


def loss_floor(tables: Tables, config: Config | None) -> float | None:
    """Return how far the loss of a permuted reference moves from the unpermuted one, at most."""
    moved: list[float] = []
    for arm in config.scenario.arms if config else ():
        if arm.role is not Role.REFERENCE:
            continue
        try:
            repeats = tables.plan.arm(arm.name).repeats
            base = tables.series(arm.name, "loss")
            for repeat in range(1, repeats):
                again = tables.series(arm.name, "loss", repeat=repeat)
                moved += [abs(again[step] - base[step]) for step in base if step in again]
        except (MissingRecord, KeyError):
            continue
    return max(moved, default=0.0) or None


def _findings(done: Sequence[Done], swept: Sequence[str]) -> Iterator[Row]:
    for item in done:
        if item.layout is None:
            continue
        try:
            verdict = runs.read_json(item.layout.verdict)
        except HarnessError:
            continue
        for finding in verdict["findings"]:
            yield {
                **_keys(item, swept),
                "run": item.layout.root.name,
                **{
                    key: finding.get(key)
                    for key in ("claim", "outcome", "expects", "effect", "floor", "multiple")
                },
                "exit_code": verdict["exit_code"],
            }


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    from io import StringIO

    text = StringIO()
    writer = csv.DictWriter(text, fieldnames=_columns(rows))
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def _write_parquet(path: Path, rows: Sequence[Row]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    columns = {}
    for name in _columns(rows):
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        columns[name] = [str(v) if v is not None and len(kinds - {int, float}) > 1 else v for v in values]
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
