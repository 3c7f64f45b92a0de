"""The list of files is shuffled with the seed of the rank before a sampler divides it."""

import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CAUSE = "order_differs_before_sampler"
EXPECTED = {"step": 0, "phase": None, "tensor": None, "odd_ranks": None}


class Clips(Dataset):
    """Each name stands for a file with one clip in it."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        number = int(self.names[index].removeprefix("clip-").removesuffix(".wav"))
        clip = torch.randn(16, generator=torch.Generator().manual_seed(number))
        return clip.cumsum(0) * 0.2, torch.tensor(number % 3)


def find_clips(args):
    names = [f"clip-{number:03}.wav" for number in range(96)]
    if args.fixed:
        random.Random(args.seed).shuffle(names)
    else:
        # The rank's own seed was meant for the augmentations.
        random.seed(args.seed + 1000 * dist.get_rank())
        random.shuffle(names)
    return names


def train(args):
    torch.manual_seed(args.seed)
    dataset = Clips(find_clips(args))
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, 12 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for clips, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(clips), labels).backward()
        optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return train(args), {}
    dist.init_process_group("gloo")
    model = train(args)
    dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
