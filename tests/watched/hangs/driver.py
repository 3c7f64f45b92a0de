"""Runs many ways in which ranks part in one set of ranks, each in a process group of its own.

python -m torch.distributed.run --nproc-per-node=3 -m tests.watched.hangs.driver OUT CASES.json

A rank that is through with its way destroys its group, as the end of its process would: the ones
that still wait for it then have an error at once, and nobody needs a time limit.
"""

import argparse
import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Its functions keep the group that is there when they are defined.
import torch.distributed.nn.functional

from harness.watch.answers.closing import answer
from harness.watch.watcher import Watcher
from tests.watched.hangs import ways


def main():
    out, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    for name, case in cases.items():
        watcher = Watcher(folder=str(out / name))
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=case.get("timeout", 60)),
        )
        error = None
        try:
            arguments = argparse.Namespace(odd=1, fixed=case.get("fixed", False))
            getattr(ways, case["way"])(arguments)
        except Exception as raised:
            error = raised
        given = answer(watcher, script_code=int(error is not None), error=error)
        if given is not None:
            text = {"answer": given.to_json(), "raised": repr(error)}
            (out / f"{name}.json").write_text(json.dumps(text, indent=1))
        # A wrapped model holds the group, and its connections, until it is collected.
        del watcher, error
        gc.collect()
        dist.destroy_process_group()
        # Their groups part, so they meet at the store.
        if store.add(f"through {name}", 1) == world_size:
            store.set(f"all through {name}", "yes")
        store.wait([f"all through {name}"])


if __name__ == "__main__":
    main()
