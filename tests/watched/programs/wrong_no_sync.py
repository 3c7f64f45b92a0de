"""Accumulation that leaves no_sync before the last backward, but after its forward."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "no_sync_wrong_half"
EXPECTED = {
    "step": 0,
    "phase": "gradients",
    "tensor": ("4.weight", "4.bias"),
    "odd_ranks": (),
}


def accumulate(model, window, fixed):
    loss_fn = nn.SmoothL1Loss()
    for index, x in enumerate(window):
        last = index == len(window) - 1
        if fixed:
            with nullcontext() if last else model.no_sync():
                loss = loss_fn(model(x), x.flip(1))
                (loss / len(window)).backward()
        else:
            with model.no_sync():
                loss = loss_fn(model(x), x.flip(1))
            # Gradients are reduced in backward, so it is backward that has to be outside.
            with nullcontext() if last else model.no_sync():
                (loss / len(window)).backward()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    start = not dist.is_initialized()
    if start:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    model = DDP(net.append(nn.Linear(16, 6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.updates):
        windows = torch.randn(args.accum, 12, 6, generator=generator)
        accumulate(model, [x[rank::world] for x in windows], args.fixed)
        optimizer.step()
        optimizer.zero_grad()
    if start:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
