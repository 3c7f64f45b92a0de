"""What a run costs from the command line to the verdict, in multiples of a bare torchrun.

python -m tests.benchmarks.bench_launch [ROUNDS] [--large]

The bare torchrun starts the same number of ranks, inits gloo, all-reduces one number and ends. The
two are run in turn, so that a machine whose speed drifts slows both; the median ratio is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.many_arms import ARMS, write_scenario

ROOT = Path(__file__).resolve().parent.parent.parent
BARE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def seconds(argv: Sequence[str], env: dict[str, str]) -> float:
    """Run a command to its end and return the wall time; it has to end with 0."""
    start = time.perf_counter()
    answer = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(
            f"{' '.join(argv)} ended with {answer.returncode}\n{answer.stderr[-2000:]}"
        )
    return time.perf_counter() - start


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="also 64 ranks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bare.py").write_text(BARE)
        write_scenario(folder)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CROSSRANK_SCENARIOS": str(folder)}
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")

        def bare(ranks: int) -> float:
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            return seconds([*run, f"--nproc-per-node={ranks}", str(folder / "bare.py")], env)

        def repro(scenario: str, ranks: int) -> float:
            words = [f"scenario={scenario}", f"gpus={ranks}", f"results={folder / 'results'}"]
            return seconds([sys.executable, "-m", "launch", *words, "quiet=true"], env)

        def ratio(scenario: str, ranks: int) -> float:
            return repro(scenario, ranks) / bare(ranks)

        bare(2), repro("one_arm", 2)  # reads everything from disk once
        show(
            "syncbn_clip, all arms, 4 ranks",
            0.8,
            [ratio("syncbn_clip", 4) for _ in rounds(options)],
        )
        more = [
            (repro("many_arms", 4) - repro("one_arm", 4)) / (ARMS - 1) / bare(4)
            for _ in rounds(options)
        ]
        show("one more arm, 4 ranks", 0.1, more)
        show("one arm, 16 ranks", 0.4, [ratio("one_arm", 16) for _ in rounds(options)])
        if options.large:
            show("one arm, 64 ranks", None, [ratio("one_arm", 64)])


def rounds(options: argparse.Namespace) -> range:
    """Return the rounds to go."""
    return range(options.rounds)


def show(what: str, allowed: float | None, ratios: Sequence[float]) -> None:
    """Print one line."""
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}, n={len(ratios)}"
    limit = f"allowed {allowed}" if allowed is not None else "no limit"
    print(f"{what:32} {statistics.median(ratios):5.2f} x bare torchrun  ({spread}; {limit})")


if __name__ == "__main__":
    main()
