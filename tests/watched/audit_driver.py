"""Runs many audited programs in one set of ranks, as tests/watched/driver.py does.

python -m torch.distributed.run --nproc-per-node=3 -m tests.watched.audit_driver OUT CASES.json
"""

import argparse
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.watch.answers.closing import answer
from harness.watch.audit import examination
from harness.watch.audit.auditor import Auditor
from harness.watch.watcher import Watcher
from tests.watched import audited


def main():
    out, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    examination.SECONDS = 0.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name, case in cases.items():
        watcher = Watcher(folder=str(out / name))
        watcher.updates.auditor = Auditor(watcher.context, case["every"])
        try:
            audited.train(argparse.Namespace(**case))
            given = answer(watcher, script_code=0)
        finally:
            watcher.close()
        if given is not None:
            lines = given.to_json() | {"lines": given.lines()}
            (out / f"{name}.answer.json").write_text(json.dumps(lines))
        (out / f"{name}.rank{dist.get_rank()}.json").write_text(
            json.dumps({"failed": watcher.failed, "notes": watcher.notes})
        )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
