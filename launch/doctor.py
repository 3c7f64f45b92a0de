"""`python -m launch.doctor`: what this machine can run; paste it into an issue.

Exit codes: 0 ranks can be started, 12 they cannot.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from harness.verdict import strict
from launch import ending, environment
from launch.devices import choose, cuda_devices
from launch.warm import usable


def main() -> int:
    """Print the facts; returns the exit code."""
    devices = cuda_devices()
    place = choose(max(devices, 1), "auto", devices)
    facts = environment.gather(place) | {
        "cuda_devices": devices,
        "engines": ["warm", "torchrun"] if usable() else ["torchrun"],
    }
    print(json.dumps(strict(facts), indent=2))
    problems = []
    if facts["packages"]["torch"] is None:
        problems.append("torch is not installed for this Python: type make doctor, for .venv")
    try:
        with tempfile.NamedTemporaryFile(dir=Path.cwd()):
            pass
    except OSError as error:
        problems.append(f"cannot write here ({error.strerror}): type results=DIR when you run")
    for problem in problems:
        print(f"crossrank: {problem}", file=sys.stderr)
    return 12 if problems else 0


if __name__ == "__main__":
    ending.run(main)
