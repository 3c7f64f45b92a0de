"""Where ranks can run on this machine, found out without importing torch where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.errors import PrerequisiteError
from harness.plural import number_of

PROBE_S = 120
MOST_CPU_RANKS = 128
"""Each CPU rank is a process of its own with about 150 MB of private memory."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the ranks of a run live."""

    device: str
    backend: str
    notice: str
    """One line for the header: what runs where, and why."""


def cuda_devices() -> int:
    """Return how many CUDA devices this machine's torch can use.

    Without a device file there is none, and torch need not be imported to know.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_S
        )
        return int(answer.stdout.strip() or 0)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0


def choose(gpus: int, device: str, available: int) -> Place:
    """Decide where `gpus` ranks run, given `device` (auto, cpu, cuda) and the devices there are.

    Raises:
        PrerequisiteError: with device=cuda and too few devices, or more CPU ranks than a machine
            can bear.
    """
    if device == "cuda" and available < gpus:
        raise PrerequisiteError(
            f"device=cuda gpus={gpus} needs {gpus} CUDA devices, this machine has {available}\n"
            f"type device=auto to run {gpus} CPU ranks over gloo"
            + (f", or gpus={available}" if available else "")
        )
    if device != "cpu" and available >= gpus:
        return Place(
            device="cuda",
            backend="nccl",
            notice=f"{number_of(gpus, 'rank')}, one CUDA device each, over NCCL",
        )
    if gpus > MOST_CPU_RANKS:
        raise PrerequisiteError(
            f"gpus={gpus}: at most {MOST_CPU_RANKS} CPU ranks on one machine "
            f"(each is a process), and this machine has {available} CUDA devices\n"
            f"type gpus={MOST_CPU_RANKS} or less"
        )
    if device == "cpu":
        why = "as asked by device=cpu"
    elif available:
        why = f"only {number_of(available, 'CUDA device')} for {number_of(gpus, 'rank')}"
    else:
        why = "no CUDA device here"
    return Place(
        device="cpu", backend="gloo", notice=f"{number_of(gpus, 'CPU rank')} over gloo ({why})"
    )
