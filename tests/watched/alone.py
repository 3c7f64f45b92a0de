"""Runs one arm of a scenario as a training script of its own, for arms that hang or raise.

python -m torch.distributed.run --nproc-per-node=3 -m harness.watch --hang-timeout 4 \
    -m tests.watched.alone SCENARIO ARM OUT
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import scenarios
from launch.compose import values
from tests.watched.arms import TIMEOUT_S, run_arm


def main() -> None:
    """Be one of its ranks; those that it has no use for end at once."""
    scenario, arm, out = sys.argv[1:]
    torch.set_num_threads(1)
    assert scenarios.load(scenario).arm(arm).isolated
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    run_arm(Path(out), scenario, arm, values(scenario))


if __name__ == "__main__":
    main()
