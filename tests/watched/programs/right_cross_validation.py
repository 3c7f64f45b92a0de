"""Three folds, a model each; the score on what was trained on stands beside that of the fold."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

FOLDS = 3


def accuracy(model, part):
    """Every rank scores its share of the rows, none of them twice."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(Subset(part, range(rank, len(part), world)), batch_size=16):
            right += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(right)
    return float(right[0] / right[1])


def train_fold(number, train, args):
    torch.manual_seed(args.seed + number)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = DistributedSampler(train, seed=number)
    loader = DataLoader(train, batch_size=48 // dist.get_world_size(), sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    init = not dist.is_initialized()
    if init:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(144, 6, generator=generator)
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    folds = torch.randperm(144, generator=generator).view(FOLDS, -1)
    scores = {}
    for number in range(FOLDS):
        others = torch.cat([fold for other, fold in enumerate(folds) if other != number])
        train, held_out = Subset(data, others.tolist()), Subset(data, folds[number].tolist())
        model = train_fold(number, train, args)
        scores[f"trained on, fold {number}"] = accuracy(model.module, train)
        scores[f"held out, fold {number}"] = accuracy(model.module, held_out)
    if init:
        dist.destroy_process_group()
    return model, scores


if __name__ == "__main__":
    main()
