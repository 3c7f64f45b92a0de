"""Records many cases in one set of ranks: OUT/CASE for each, and nudged repeats of it.

python -m torch.distributed.run --nproc-per-node=2 -m tests.watched.twin_driver OUT NUDGES
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from harness.watch.answers.closing import close
from harness.watch.twin.recorder import Nudge, Recorder
from harness.watch.watcher import Watcher
from tests.watched import twins


def main():
    out, nudges = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for fault in twins.FAULTS:
        for nudge in range(nudges + 1):
            name = f"{fault}-nudged{nudge}" if nudge else fault
            watcher = Watcher(folder=str(out / "watch" / name))
            watcher.updates.recorder = Recorder(str(out / name), watcher.context)
            if nudge:
                Nudge(nudge)
            twins.train(argparse.Namespace(fault=fault, steps=6, seed=0))
            close(watcher, script_code=0, quiet=True)
            assert watcher.failed is None, watcher.failed
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
