"""The validation error is a mean over batches, the last of which is shorter than the others."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "mean_of_means"
# Validated once, after eight updates: 26 samples in batches of four.
EXPECTED = {"step": 8, "phase": "evaluation", "tensor": None, "odd_ranks": None}


class Meter:
    def __init__(self, fixed):
        self.fixed, self.total, self.count = fixed, 0.0, 0

    def update(self, mean, samples):
        weight = samples if self.fixed else 1
        self.total += mean * weight
        self.count += weight

    def compute(self):
        if self.fixed:
            both = torch.tensor([self.total, self.count], dtype=torch.float64)
            dist.all_reduce(both)
            return (both[0] / both[1]).item()
        mean = torch.tensor(self.total / self.count, dtype=torch.float64)
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()


@torch.no_grad()
def validate(net, x, y, fixed):
    meter = Meter(fixed)
    net.eval()
    for inputs, target in zip(x.split(4), y.split(4), strict=True):
        meter.update(nn.functional.mse_loss(net(inputs), target).item(), len(inputs))
    return meter.compute()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    initial = not dist.is_initialized()
    if initial:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        x = torch.randn(12, 3, generator=generator)[rank::world]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    held_out = torch.randn(26, 3, generator=generator)
    target = held_out.sum(1, keepdim=True)
    mine = slice(rank, None, world)
    error = validate(model.module, held_out[mine], target[mine], args.fixed)
    if rank == 0:
        print(f"validation error {error:.6f}")
    if initial:
        dist.destroy_process_group()
    return model, {"error": error}


if __name__ == "__main__":
    main()
