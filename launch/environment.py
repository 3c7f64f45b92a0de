"""What a stranger needs to judge a run: versions, source, machine, command line."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
from launch.devices import Place

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "pandas", "pyarrow", "wandb", "xxhash")
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG")


def gather(place: Place) -> dict[str, Any]:
    """Return the environment of a run; imports none of the packages whose version it names."""
    return {
        "crossrank": harness.__version__,
        "source": source(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "argv": sys.argv,
        "where": place.notice,
        "host": platform.node(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def torch_version() -> str | None:
    """Return the version of the torch that ranks will import, without importing it."""
    return _version("torch")


def source() -> dict[str, Any]:
    """Return the commit and whether files differ from it; None where there is no git."""
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
