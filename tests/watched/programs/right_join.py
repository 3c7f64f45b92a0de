"""Shards of unequal length under Join: ranks make different numbers of updates of their own."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def shard(rank, seed):
    """As many batches as this rank has recordings; rank 0 has the fewest."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    batches = 5 + rank
    x = torch.randn(batches, 4, 7, generator=generator)
    return list(zip(x, x.sum(-1, keepdim=True).sin(), strict=True))


def worker(args):
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(7, 12), nn.ELU(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
    seen = torch.zeros(1)
    with Join([model]):
        for x, y in shard(rank, args.seed):
            optimizer.zero_grad()
            loss = nn.functional.huber_loss(model(x), y)
            loss.backward()
            optimizer.step()
            seen += len(x)
    # A rank that ran dry gets its weights from one that made the last update.
    dist.all_reduce(seen)
    print(f"rank {rank}: {int(seen.item())} samples in all")
    return model, {"samples": seen.item()}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return worker(args)
    dist.init_process_group("gloo")
    try:
        return worker(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
