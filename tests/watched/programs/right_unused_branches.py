"""Layer drop and task heads: which parameters take part differs between steps and ranks."""

import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class MultiTask(nn.Module):
    def __init__(self, tasks, dim=10):
        super().__init__()
        self.stem = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.heads = nn.ModuleDict({task: nn.Linear(dim, 1) for task in tasks})

    def forward(self, x, task, kept):
        x = torch.tanh(self.stem(x))
        for index in kept:
            x = x + torch.tanh(self.blocks[index](x))
        return self.heads[task](x).squeeze(1)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    tasks = ("sum", "norm", "max")
    truth = {"sum": lambda x: x.sum(1), "norm": lambda x: x.norm(dim=1), "max": lambda x: x.amax(1)}
    opened = not dist.is_initialized()
    if opened:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    # A head that no rank has used keeps its gradient None or zero; DDP finds that out by itself.
    model = DDP(MultiTask(tasks), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    dice = random.Random(args.seed)  # the same layers on all ranks
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        kept = [index for index in range(3) if dice.random() < 0.7]
        task = tasks[(rank + step) % len(tasks)]  # another task on every rank
        x = torch.randn(24, 5, generator=generator)[rank::world]
        loss = nn.functional.mse_loss(model(x, task, kept), truth[task](x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if opened:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
