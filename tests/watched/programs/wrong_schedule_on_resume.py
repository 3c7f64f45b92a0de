"""Resumed with model and optimizer; warm-up and decay begin anew, as nobody loads the schedule."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "scheduler_state_lost"
# The restart brings the rate with the optimizer; the step after it sets that of the second update.
EXPECTED = {"step": 5, "phase": "gradients", "tensor": None, "odd_ranks": None}


def session(path, begin, end, args):
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=args.steps)
    if begin:
        saved = torch.load(path, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if args.fixed:
            schedule.load_state_dict(saved["schedule"])
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.randn(args.steps, 12, 4, generator=torch.Generator().manual_seed(args.seed))
    for step in range(begin, end):
        x = data[step, rank::world]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.prod(1, keepdim=True)).backward()
        optimizer.step()
        if step + 1 < args.steps:
            schedule.step()
    if rank == 0:
        parts = {"model": model.module, "optimizer": optimizer, "schedule": schedule}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
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
    session(names[0], 0, args.interrupted_after, args)
    model = session(names[0], args.interrupted_after, args.steps, args)
    if dist.get_rank() == 0:
        os.remove(names[0])  # noqa: PTH107
    if init:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
