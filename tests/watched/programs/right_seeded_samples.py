"""Spectrograms with noise: reproducible by sample, of one length by batch, shifted by rank.

All ranks and their workers are seeded alike. What must not be alike is not: the noise of a sample
comes from its own seed, and shifts from a generator of the rank's. How long the rows of a batch
are is drawn while they are put together, and is meant to be the same on all ranks.
"""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Spectrograms(Dataset):
    def __init__(self, rows, rank):
        self.rows = rows
        self.epoch = 0
        self.shifts = random.Random(rank)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        torch.manual_seed(1000 * self.epoch + index)
        row = self.rows[index] + 0.1 * torch.randn(self.rows.shape[1:])
        return row.roll(self.shifts.randrange(8), dims=0), index % 3


def cut(samples):
    length = random.choice((4, 6, 8))
    rows, labels = zip(*samples, strict=True)
    return torch.stack(rows)[:, :length], torch.tensor(labels)


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    rows = torch.randn(36, 8, 5, generator=torch.Generator().manual_seed(args.seed))
    data = Spectrograms(rows, rank)
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(
        data,
        6,
        sampler=sampler,
        collate_fn=cut,
        num_workers=args.workers,
        multiprocessing_context="fork" if args.workers else None,
    )
    net = DistributedDataParallel(nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x).mean(1), y).backward()
            optimizer.step()
    return net, {}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return train(args)
    dist.init_process_group("gloo")
    try:
        return train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
