"""How long a run takes to become a pandas frame, as a multiple of Parquet's own reader.

python -m tests.benchmarks.bench_load [VALUES]      10 million by default: 2 GiB, a minute
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from harness import compare, load, parquet, record
from harness.plan import ArmPlan, Layout, Plan
from harness.plan import write_text as write
from harness.tables import Tables

RANKS, METRICS, REPEATS = 4, 10, 3


def make(root: Path, values: int) -> Layout:
    """Record a run of four ranks: nine numbers and a digest in each record."""
    layout = Layout(root)
    plan = Plan(
        run_id="bench",
        scenario="bench",
        params={},
        arms=(ArmPlan(name="faulty", ranks=RANKS, repeats=1, isolated=False),),
        world_size=RANKS,
        device="cpu",
        backend="gloo",
        seed=0,
        engine="warm",
        collective_timeout_s=1.0,
        arm_timeout_s=1.0,
    )
    write(layout.plan, plan.to_json())
    for rank in range(RANKS):
        header = record.Header(
            run="bench", scenario="bench", arm="faulty", rank=rank, world_size=RANKS
        )
        writer = record.Writer(layout, header)
        for step in range(values // RANKS // METRICS):
            metrics: dict[str, record.Value] = {
                f"layer{i}.norm": (step + rank) / (i + 3) for i in range(METRICS - 1)
            }
            metrics["weight.digest"] = f"{step * 0x9E3779B97F4A7C15 % 2**64:016x}"
            writer.write(metrics, repeat=0, step=step, phase="after_step")
        writer.end("completed")
    return layout


def best(call: Callable[[], Any]) -> float:
    """Return the shortest of a few calls: what the work costs on a machine others use too."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print the ratios."""
    values = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory() as name:
        layout = make(Path(name), values)
        start = time.perf_counter()
        tables = Tables.read(layout)
        read = time.perf_counter() - start
        start = time.perf_counter()
        parquet.write(layout, tables)
        compacted = time.perf_counter() - start
        del tables
        own = best(lambda: pq.read_table(layout.parquet).to_pandas())
        ours = best(lambda: load(name))
        frame = load(name)
        start = time.perf_counter()
        compare(frame)
        compared = time.perf_counter() - start
        rows = len(frame)
        del frame
        layout.parquet.unlink()
        streams = best(lambda: load(name))
    print(f"{rows:,} values; Parquet's own reader into pandas = 1 ({own:.2f} s)")
    print(f"  load(), from Parquet          {ours / own:6.2f}   (at most 1.5)")
    print(f"  load(), from the streams      {streams / own:6.2f}   (at most 12)")
    print(f"  compare()                     {compared / own:6.2f}")
    print(f"  Tables.read, for the judge    {read / own:6.2f}")
    print(f"  compaction into Parquet       {compacted / own:6.2f}")


if __name__ == "__main__":
    main()
