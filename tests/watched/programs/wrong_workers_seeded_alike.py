"""Small images with random crops and flips, read by workers; all ranks were seeded alike."""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CAUSE = "rng_not_decorrelated"
# Replicas agree with each other: each of them augments, and all in the same way.
EXPECTED = {"step": 0, "phase": None, "tensor": None, "odd_ranks": None}


class Images(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand(count, 1, 10, 10, generator=generator)
        self.labels = torch.arange(count) % 4

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        top, left = random.randint(0, 2), random.randint(0, 2)
        image = self.images[index, :, top : top + 8, left : left + 8]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image, self.labels[index], 3.0 * top + left


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    started_here = not dist.is_initialized()
    if started_here:
        dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    model = DDP(net)
    if args.fixed:
        torch.manual_seed(args.seed + 1 + rank)
    images = Images(48, args.seed)
    sampler = DistributedSampler(images, seed=args.seed)
    loader = DataLoader(images, 8, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    crops = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y, crop in loader:
            crops += crop.tolist()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    if started_here:
        dist.destroy_process_group()
    return model, {"mean_crop": sum(crops) / len(crops)}


if __name__ == "__main__":
    main()
