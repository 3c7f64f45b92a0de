"""Bootstrapped targets: the target network follows the online one, in rank 0's block."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "copied_weights_differ"
# The second update is the first one whose targets are not the same network's on all ranks.
EXPECTED = {"step": 1, "phase": "gradients", "tensor": None, "odd_ranks": None}


@torch.no_grad()
def follow(target, online, momentum):
    for ours, theirs in zip(target.parameters(), online.parameters(), strict=True):
        ours.lerp_(theirs, 1 - momentum)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--momentum", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    distributed = not dist.is_initialized()
    if distributed:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    online = DDP(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    target = copy.deepcopy(online.module).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        state, after = torch.randn(2, 12, 4, generator=generator)[:, rank::world]
        reward = state[:, :1] - state[:, 1:2]
        with torch.no_grad():
            value = reward + 0.9 * target(after)
        optimizer.zero_grad()
        nn.functional.mse_loss(online(state), value).backward()
        optimizer.step()
        if args.fixed:
            follow(target, online.module, args.momentum)
        if rank == 0:
            if not args.fixed:
                follow(target, online.module, args.momentum)
            print(f"step {step} value {value.mean():.3f}")
    if distributed:
        dist.destroy_process_group()
    return online, {}


if __name__ == "__main__":
    main()
