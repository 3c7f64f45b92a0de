"""Task heads are made in the order in which tasks turn up in this rank's part of the data."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "structure_differs"
# Sample 1 is the only one among the first four that is about depth, and rank 1 begins with it.
EXPECTED = {
    "step": 0,
    "phase": "start",
    "tensor": (
        "heads.normals.weight",
        "heads.normals.bias",
        "heads.depth.weight",
        "heads.depth.bias",
    ),
    "odd_ranks": (1,),
}
TASKS = ["normals", "depth", "normals", "normals"] + (["depth"] * 4 + ["normals"] * 4) * 10


class MultiTask(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.trunk = nn.Linear(6, 10)
        self.heads = nn.ModuleDict({task: nn.Linear(10, 1) for task in tasks})

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return {task: head(hidden).squeeze(1) for task, head in self.heads.items()}


def target(task, x):
    return x.sum(1) if task == "depth" else x.norm(dim=1)


def loss_of(outputs, x, names):
    total = 0.0
    for task in sorted(outputs):
        mine = torch.tensor([name == task for name in names])
        error = (outputs[task] - target(task, x)).square()
        total = total + (error * mine).mean()
    return total


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    x = torch.randn(len(TASKS), 6, generator=torch.Generator().manual_seed(args.seed))
    mine, names = x[rank::world], TASKS[rank::world]
    tasks = sorted(set(names)) if args.fixed else list(dict.fromkeys(names))
    model = DDP(MultiTask(tasks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    per_rank = 12 // world
    for step in range(7):
        rows = slice(step * per_rank, (step + 1) * per_rank)
        loss = loss_of(model(mine[rows]), mine[rows], names[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    whole_run = not dist.is_initialized()
    if whole_run:
        dist.init_process_group("gloo")
    model = train(args)
    if whole_run:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
