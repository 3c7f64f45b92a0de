"""Write the records of a run by hand: what tests of tables, judges and reports start from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.plan import ArmPlan, Layout, Plan, write_text
from harness.record import Header, Writer


def plan(
    arms: Mapping[str, int], *, repeats: Mapping[str, int] | None = None, **changes: Any
) -> Plan:
    """Return a plan with these arms (name -> ranks)."""
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "scenario": "probe",
        "params": {},
        "arms": tuple(
            ArmPlan(name=name, ranks=ranks, repeats=(repeats or {}).get(name, 1), isolated=False)
            for name, ranks in arms.items()
        ),
        "world_size": max(arms.values(), default=1),
        "device": "cpu",
        "backend": "gloo",
        "seed": 0,
        "engine": "warm",
        "collective_timeout_s": 60.0,
        "arm_timeout_s": 120.0,
    }
    return Plan(**{**fields, **changes})


def write(
    root: Path,
    of: Plan,
    rows: Iterable[tuple[str, int, Mapping[str, Any]]],
    *,
    ends: Mapping[tuple[str, int], str | None] | None = None,
) -> Layout:
    """Write a run directory: rows are (arm, rank, {repeat, step, phase, metrics, tensors}).

    Every stream ends as "completed" unless `ends` says otherwise (None = cut off).
    """
    layout = Layout(root)
    write_text(layout.plan, of.to_json())
    writers = {
        (arm.name, rank): Writer(
            layout,
            Header(
                run=of.run_id, scenario=of.scenario, arm=arm.name, rank=rank, world_size=arm.ranks
            ),
        )
        for arm in of.arms
        for rank in range(arm.ranks)
    }
    for arm, rank, row in rows:
        writers[arm, rank].write(
            row.get("metrics", {}),
            repeat=row.get("repeat", 0),
            step=row.get("step", 0),
            phase=row.get("phase", ""),
            tensors={k: array("d", v) for k, v in row.get("tensors", {}).items()} or None,
        )
    for key, writer in writers.items():
        status = (ends or {}).get(key, "completed")
        writer.end(status) if status else writer.close()
    return layout
