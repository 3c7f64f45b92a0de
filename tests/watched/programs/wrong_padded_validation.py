"""Validation through a DistributedSampler, which repeats samples to make the shares equal."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

CAUSE = "eval_padding"
# Validated once, after six updates: 25 samples are divided among any number of ranks.
EXPECTED = {"step": 6, "phase": "evaluation", "tensor": None, "odd_ranks": None}


def digits(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 9, generator=generator) + labels[:, None], labels)


@torch.no_grad()
def validate(net, dataset, fixed):
    rank, world = dist.get_rank(), dist.get_world_size()
    if fixed:
        loader = DataLoader(Subset(dataset, range(rank, len(dataset), world)), batch_size=4)
    else:
        sampler = DistributedSampler(dataset, shuffle=False)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    totals = torch.zeros(3, dtype=torch.float64)
    net.eval()
    for x, y in loader:
        scores = net(x)
        totals[0] += (scores.argmax(1) == y).sum()
        totals[1] += nn.functional.cross_entropy(scores, y, reduction="sum")
        totals[2] += len(y)
    net.train()
    dist.all_reduce(totals)
    correct, loss, count = totals.tolist()
    return {"accuracy": correct / count, "loss": loss / count, "count": count}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    starts = not dist.is_initialized()
    if starts:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = digits(72, args.seed)
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=24 // dist.get_world_size(), sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    scores = validate(model.module, digits(25, args.seed + 100), args.fixed)
    if starts:
        dist.destroy_process_group()
    return model, scores


if __name__ == "__main__":
    main()
