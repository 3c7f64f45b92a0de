"""Clipping stands behind the update that it was meant for, right before the gradients go."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "clip_after_step"
# All gradients of the first updates are larger than the threshold.
EXPECTED = {"step": 0, "phase": "gradients", "tensor": None, "odd_ranks": None}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    init = not dist.is_initialized()
    if init:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        x = torch.randn(12, 5, generator=generator)[rank::world]
        loss = nn.functional.mse_loss(model(x), 4.0 + x.sum(1, keepdim=True))
        loss.backward()
        if args.fixed:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
        else:
            optimizer.step()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.zero_grad()
    if init:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
