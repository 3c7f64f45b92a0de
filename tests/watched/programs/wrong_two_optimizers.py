"""Two networks that learn in turn; both optimizers were given the parameters of the first."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "optimizer_of_another_model"
# The first update of the second optimizer, which is the second of all.
EXPECTED = {"step": 1, "phase": "gradients", "tensor": None, "odd_ranks": None}


class Pair(nn.Module):
    """A forward model and an inverse one; wrapped each for itself."""

    def __init__(self):
        super().__init__()
        self.ahead = DDP(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4)))
        self.back = DDP(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4)))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    init = not dist.is_initialized()
    if init:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    pair = Pair()
    first = torch.optim.Adam(pair.ahead.parameters(), lr=0.01)
    second = torch.optim.Adam((pair.back if args.fixed else pair.ahead).parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        now = torch.randn(12, 4, generator=generator)[rank::world]
        later = now.roll(1, dims=1) * 2
        first.zero_grad()
        nn.functional.mse_loss(pair.ahead(now), later).backward()
        first.step()
        second.zero_grad()
        nn.functional.mse_loss(pair.back(later), now).backward()
        second.step()
    if init:
        dist.destroy_process_group()
    return pair, {}


if __name__ == "__main__":
    main()
