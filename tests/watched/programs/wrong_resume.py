"""Interrupted and resumed from a checkpoint that has the weights only."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "optimizer_state_lost"
# The first update after the restart is made without momentum.
EXPECTED = {"step": 4, "phase": "parameters", "tensor": None, "odd_ranks": None}


def train(args, path, first, last):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.95)
    if first > 0:
        checkpoint = torch.load(path, weights_only=True)
        net.load_state_dict(checkpoint["model"])
        if args.fixed:
            optimizer.load_state_dict(checkpoint["optimizer"])
    model = DDP(net)
    data = torch.randn(args.steps, 12, 4, generator=torch.Generator().manual_seed(args.seed))
    for step in range(first, last):
        x = data[step, rank::world]
        loss = nn.functional.mse_loss(model(x), x.prod(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": last}
        torch.save(content, path)
    dist.barrier()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--interrupted-after", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    init = not dist.is_initialized()
    if init:
        dist.init_process_group("gloo")
    names = [None]
    if dist.get_rank() == 0:
        handle, names[0] = tempfile.mkstemp(suffix=".pt")
        os.close(handle)
    dist.broadcast_object_list(names)
    train(args, names[0], 0, args.interrupted_after)
    model = train(args, names[0], args.interrupted_after, args.steps)
    if dist.get_rank() == 0:
        os.remove(names[0])  # noqa: PTH107
    if init:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
