"""A loader that shuffles with the common seed and no sampler: all ranks train on the same rows."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CAUSE = "data_not_sharded"
EXPECTED = {"step": 0, "phase": None, "tensor": None, "odd_ranks": None}


def make_loader(dataset, args):
    per_rank = args.batch_size // dist.get_world_size()
    if args.fixed:
        sampler = DistributedSampler(dataset, seed=args.seed, drop_last=True)
        return DataLoader(dataset, per_rank, sampler=sampler)
    generator = torch.Generator().manual_seed(args.seed)
    return DataLoader(dataset, per_rank, shuffle=True, drop_last=True, generator=generator)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    first = not dist.is_initialized()
    if first:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    x = torch.randn(144, 8, generator=torch.Generator().manual_seed(args.seed))
    dataset = TensorDataset(x, x[:, 0] * x[:, 1])
    loader = make_loader(dataset, args)
    model = DDP(nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 1), nn.Flatten(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (inputs, target) in enumerate(loader):
        if step == args.updates:
            break
        loss = nn.functional.mse_loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if first:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
