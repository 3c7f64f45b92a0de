"""What recording costs a rank: 100 metrics a step, as a share of the 100 µs that are allowed.

python -m tests.benchmarks.bench_record [ROUNDS]
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import record
from harness.plan import Layout
from harness.rank import Rank

METRICS = 100
ALLOWED = 100e-6
STEPS = 50
"""Steps in a round: short, so that some rounds go by without another process between."""


def per_step(call: Callable[[int], None], rounds: int) -> float:
    """Return the seconds per step of the fastest round."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for step in range(STEPS):
            call(step)
        times.append((time.perf_counter() - start) / STEPS)
    return min(times)


def main() -> None:
    """Print the figures."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    # Full-length doubles: the dearest to print, and what losses and norms look like.
    values = {f"layer{i}.weight.norm": math.sqrt(i + 2) for i in range(METRICS)}
    line = json.dumps(values).encode() + b"\n"
    with tempfile.TemporaryDirectory() as name:
        header = record.Header(run="bench", scenario="bench", arm="faulty", rank=0, world_size=1)
        writer = record.Writer(Layout(Path(name)), header)
        rank = Rank(
            rank=0,
            local_rank=0,
            world_size=1,
            device="cpu",
            backend="gloo",
            seed=0,
            collective_timeout_s=1.0,
            writer=writer,
        )
        bare = os.open(Path(name) / "bare", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        logged = per_step(lambda step: rank.log(step=step, phase="after_step", **values), rounds)
        written = per_step(lambda step: writer.write(values, repeat=0, step=step), rounds)
        one = per_step(lambda step: rank.log(step=step, phase="after_step", loss=0.1), rounds)
        system = per_step(lambda step: os.write(bare, line) and None, rounds)
        numbers = per_step(lambda step: [repr(value) for value in values.values()] and None, rounds)
        writer.end("completed")
        os.close(bare)
    print(f"{METRICS} metrics a step; allowed: {ALLOWED * 1e6:.0f} µs = 1")
    print(f"  Rank.log              {logged / ALLOWED:5.2f}   ({logged * 1e6:.0f} µs)")
    print(f"  of it Writer.write    {written / ALLOWED:5.2f}")
    print(f"    printing the digits {numbers / ALLOWED:5.2f}   (Python's repr of a float)")
    print(f"    the system call     {system / ALLOWED:5.2f}")
    print(f"  Rank.log of 1 metric  {one / ALLOWED:5.2f}")


if __name__ == "__main__":
    main()
