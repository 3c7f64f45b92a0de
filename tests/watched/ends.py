"""Ways in which a script can end, and things that a script must find as it left them."""

# ruff: noqa: E402, PTH100, PTH120  the environment comes before torch; paths as in user scripts

import argparse
import atexit
import os
import signal
import sys
import time

# Some settings are read by torch when it is imported, so they have to come first.
os.environ["OMP_NUM_THREADS"] = "1"
assert "torch" not in sys.modules, "somebody imported torch ahead of the script"

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--end", required=True)
parser.add_argument("--rank", type=int, default=1)
args = parser.parse_args()
sys.excepthook = lambda kind, error, trace: print("own hook:", kind.__name__, trace.tb_lineno)


class Pickled:
    pass


def finish_slowly():
    time.sleep(1)
    print("finished at exit", flush=True)


def main():
    import pickle

    assert type(pickle.loads(pickle.dumps(Pickled()))) is Pickled
    assert sys.argv[1:3] == ["--end", args.end]
    assert sys.path[0] == os.path.dirname(os.path.abspath(__file__))
    if args.end == "no_optimizer":
        return
    if "RANK" not in os.environ:
        model = nn.Linear(3, 3)
    else:
        dist.init_process_group("gloo")
        model = DDP(nn.Linear(3, 3))
    mine = dist.is_initialized() and dist.get_rank() == args.rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    os.chdir("/")
    for step in range(4):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and mine:
            if args.end == "raises":
                raise ValueError("as a script does")
            if args.end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if args.end == "diverges_and_raises":
                with torch.no_grad():
                    model.module.weight[0, 0] += 1
        if args.end == "diverges_and_raises" and step == 3 and mine:
            raise ValueError("later")
    print("done", flush=True)
    if args.end == "slow_exit":
        if mine:
            with torch.no_grad():
                model.module.weight[0, 0] += 1
        model.zero_grad()
        optimizer.step()
        atexit.register(finish_slowly)
    if dist.is_initialized():
        dist.destroy_process_group()
    if args.end == "exit3":
        sys.exit(3)
    if args.end == "exit_text":
        sys.exit("a last word")


if __name__ == "__main__":
    main()
