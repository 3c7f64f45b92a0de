"""A cosine schedule whose length is that of the local loader, and shards are not equally long."""

import argparse
import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "rank_dependent_schedule"
# All begin with the same rate; the cosine of rank 0 is longer, so its second rate is higher.
EXPECTED = {
    "step": 1,
    "phase": "gradients",
    "tensor": ("param_groups[0]['lr']",),
    "odd_ranks": (0,),
}


def shard_of(rank, seed):
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    x = torch.randn(36 if rank == 0 else 24, 5, generator=generator)
    return TensorDataset(x, x.exp().sum(1, keepdim=True).log())


def train(args):
    torch.manual_seed(args.seed)
    loader = DataLoader(shard_of(dist.get_rank(), args.seed), batch_size=4)
    length = torch.tensor(len(loader))
    if args.fixed:
        dist.all_reduce(length, op=dist.ReduceOp.MIN)
    model = DDP(nn.Sequential(nn.Linear(5, 15), nn.Softplus(), nn.Linear(15, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    total = args.epochs * int(length)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    # As many updates as the shortest shard has batches.
    for x, y in itertools.islice(itertools.cycle(loader), args.updates):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--updates", type=int, default=10)
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
