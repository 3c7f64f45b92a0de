"""Ranks that the script starts itself: no launcher around it."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def worker(rank, args, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        past = args.fault == "bypass" and step == 2
        (model.module if past else model)(torch.ones(2, 4) + rank).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    if args.fault == "raises" and rank == 1:
        raise ValueError("as a rank does")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="none")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    mp.spawn(worker, args=(args, os.path.join(args.out, "store")), nprocs=args.ranks)  # noqa: PTH118
    print("joined")
