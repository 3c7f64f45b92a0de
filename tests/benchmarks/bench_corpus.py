"""What a scenario takes in a run of the whole corpus, in seconds and in bare torchruns.

python -m tests.benchmarks.bench_corpus [RANKS] [key=value ...]

An idle machine of 2 cores is to need less than 1.5 s a scenario at 4 ranks, starting included.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.bench_launch import BARE, seconds

ALLOWED_S = 1.5


def main() -> None:
    """Print seconds a scenario, and how many of them a bare torchrun takes."""
    ranks, *more = sys.argv[1:] or ["4"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bare.py").write_text(BARE)
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        bare = seconds([*torchrun, f"--nproc-per-node={ranks}", str(folder / "bare.py")], env)
        words = [f"gpus={ranks}", "device=cpu", f"results={folder}", "quiet=true", *more]
        whole = seconds([sys.executable, "-m", "launch.corpus", *words], env)
        (path,) = folder.glob("corpus/*/corpus.json")
        entries = json.loads(path.read_text())["entries"]
        runs = sum(entry["seconds"] is not None for entry in entries)
    each = whole / runs
    print(
        f"{runs} scenarios at {ranks} ranks: {each:.2f} s each (allowed {ALLOWED_S} at 4 ranks), "
        f"{each / bare:.2f} x bare torchrun"
    )


if __name__ == "__main__":
    main()
