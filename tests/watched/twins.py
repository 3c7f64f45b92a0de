"""A script that is given the global batch, and takes each rank's share of it; with faults."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULTS = ("none", "times_world", "per_rank_batch", "valid_labels", "late", "bypassed")


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x = torch.randn(48, 6)
    y = x[:, :3].argmax(1)
    if args.fault == "valid_labels":
        # All of them belong to rank 0 of three.
        y[[0, 3, 6]] = -100
    for step in range(args.steps):
        if args.fault == "per_rank_batch":
            rows = torch.arange(step * 4, step * 4 + 4) * world % 48 + rank
        else:
            rows = torch.arange(step * 12, step * 12 + 12)[rank::world] % 48
        called = model.module if args.fault == "bypassed" else model
        loss = nn.functional.cross_entropy(called(x[rows]), y[rows])
        if args.fault == "times_world" or (args.fault == "late" and step >= 3):
            loss = loss * world
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    with contextlib.suppress(KeyError):
        print("rank", os.environ["RANK"])
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
