"""Dropout masks, augmentation and worker seeds that differ between ranks, as they should."""

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Augmented(Dataset):
    def __init__(self):
        self.x = np.random.RandomState(0).randn(72, 10).astype("float32")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if random.random() < 0.5:
            x = x[::-1].copy()
        return x + np.random.normal(0, 0.05, 10).astype("float32"), int(self.x[i].sum() > 0)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args(argv)
    init = not dist.is_initialized()
    if init:
        dist.init_process_group("gloo")

    set_seed(args.seed)
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.5))
    net.append(nn.Linear(32, 2))
    model = DDP(net)
    set_seed(args.seed + 1 + dist.get_rank())

    dataset = Augmented()
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=24 // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if init:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
