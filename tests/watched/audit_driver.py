"""Runs many audited programs in one set of ranks, as tests/watched/driver.py does."""

import argparse
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.watch.audit.auditor import Auditor
from harness.watch.closing import close
from harness.watch.watcher import Watcher
from tests.watched import audited


def main():
    out, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name, case in cases.items():
        watcher = Watcher(folder=str(out / name))
        watcher.auditor = Auditor(watcher.context, case.pop("every", 1))
        try:
            audited.train(argparse.Namespace(**case))
            code = close(watcher, script_code=0, quiet=False)
        finally:
            watcher.close()
        (out / f"{name}.rank{dist.get_rank()}.json").write_text(
            json.dumps({"code": code, "failed": watcher.failed, "notes": watcher.notes})
        )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
