"""Ranks started by torch.multiprocessing, with the two lines in the script, twice."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from harness.watch import attach


def train(rank, world, store, broken):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.Adam(model.parameters())
    attach(model, optimizer)
    attach(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((3, 4), float(rank))).square().mean().backward()
        if broken and rank == 2 and step == 1:
            model.module[1].bias.grad += 1e-3
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    for turn, broken in enumerate((True, False)):
        arguments = (3, f"{sys.argv[1]}/store{turn}", broken)
        mp.start_processes(train, args=arguments, nprocs=3, start_method="fork")
        print("turn", turn, file=sys.stderr, flush=True)
