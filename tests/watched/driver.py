"""Runs many fixtures in one set of ranks: importing torch takes longer than all of them.

python -m torch.distributed.run --nproc-per-node=3 -m tests.watched.driver OUT CASES.json
"""

import argparse
import importlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.watch.answers.closing import close
from harness.watch.watcher import Watcher


def main():
    out, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name, case in cases.items():
        watcher = Watcher(folder=str(out / name), whole=case.get("whole", False))
        try:
            fixture = importlib.import_module(f"tests.watched.{case['script']}")
            fixture.train(argparse.Namespace(**case["arguments"]))
            code = close(watcher, script_code=0, quiet=False)
        finally:
            watcher.close()
        (out / f"{name}.rank{dist.get_rank()}.json").write_text(
            json.dumps({"code": code, "failed": watcher.failed})
        )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
