"""Trains cases of tests/watched/invisible.py bare and audited, in real ranks: every bit the same?

python -m torch.distributed.run --nproc-per-node=2 -m tests.watched.audit_invisible OUT
"""

import json
import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.watch.audit import examination
from harness.watch.audit.auditor import Auditor
from harness.watch.closing import answer
from harness.watch.watcher import Watcher
from tests.watched.invisible import CASES, state

AUDITED = (
    "sgd_momentum",
    "adamw_fused",
    "bf16_autocast",
    "grad_scaler",
    "static_graph",
    "fully_shard",
    "zero_redundancy",
    "no_sync",
    "checkpointing",
    "two_models",
)
SHARDED = ("fully_shard",)


def run(name, watcher):
    torch.manual_seed(7 + dist.get_rank())
    random.seed(7 + dist.get_rank())
    after = state(CASES[name]())
    if watcher is not None:
        answer(watcher, script_code=0)
    return after


def main():
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    examination.SECONDS = 0.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {}
    for name in AUDITED:
        bare = run(name, None)
        watcher = Watcher(folder=str(out / name))
        watcher.auditor = Auditor(watcher.context, 2)
        after = run(name, watcher)
        results[name] = {
            "things": len(bare),
            "different": [key for key in bare if bare[key] != after.get(key)],
            "failed": watcher.failed,
            "notes": watcher.notes,
        }
        dist.barrier()
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
