"""Activation checkpointing with dropout, on a model that uses one layer several times."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Universal(nn.Module):
    """One block, applied `depth` times."""

    def __init__(self, dim=14, depth=3):
        super().__init__()
        self.inp = nn.Linear(7, dim)
        self.block = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Dropout(0.25))
        self.out = nn.Linear(dim, 2)
        self.depth = depth

    def forward(self, x):
        x = self.inp(x)
        for _ in range(self.depth):
            x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.out(x)


def train_one_epoch(model, optimizer, x, y):
    total = 0.0
    for inputs, target in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(x)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    distributed = dist.is_initialized()
    if not distributed:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(Universal(), static_graph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    # From here on each rank draws masks of its own.
    torch.manual_seed(args.seed + 1000 * (rank + 1))
    data = torch.randn(4, 24, 7, generator=torch.Generator().manual_seed(args.seed))
    target = (data.sum(-1) > 0).long()
    for epoch in range(args.epochs):
        mean = train_one_epoch(model, optimizer, data[:, rank::world], target[:, rank::world])
        print(f"rank {rank} epoch {epoch} loss {mean:.3f}")
    if not distributed:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
