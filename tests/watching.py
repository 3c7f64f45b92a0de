"""Starts real ranks under the watcher and reads what came of it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALONE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher around the tests may have left in the environment."""

TEMPORARY = tempfile.mkdtemp(prefix="watched-")
"""Where watchers meet; they keep what they have found."""
atexit.register(shutil.rmtree, TEMPORARY, ignore_errors=True)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ALONE}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": TEMPORARY}


def torchrun(*words, ranks, cwd=ROOT, seconds=100):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=seconds
    )


def rank_files(out: Path, ranks: int, stem: str = ""):
    return [json.loads((out / f"{stem}rank{rank}.json").read_text()) for rank in range(ranks)]
