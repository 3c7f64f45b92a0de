"""Shards as they were written to disk, one batch more in the first, and a plain loop over them."""

import argparse
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "uneven_inputs"
# Eight batches on all ranks but rank 0, which has nine.
EXPECTED = {"step": 8, "phase": None, "tensor": None, "odd_ranks": (0,), "stuck": 8}
HANGS = True


def open_shard(index, seed):
    generator = torch.Generator().manual_seed(seed * 100 + index)
    x = torch.randn(36 if index == 0 else 32, 5, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).float())


def run(args):
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    loader = DataLoader(open_shard(rank, args.seed), batch_size=4)
    model = DDP(nn.Sequential(nn.Linear(5, 10), nn.Hardswish(), nn.Linear(10, 1), nn.Flatten(0)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.002)
    criterion = nn.BCEWithLogitsLoss()
    with Join([model]) if args.fixed else nullcontext():
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    dist.barrier()
    if rank == 0:
        print("one epoch done")
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return run(args), {}
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    model = run(args)
    dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
