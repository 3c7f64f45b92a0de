"""Rank 0 evaluates through the wrapper, whose forward sends buffers to the other ranks."""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "rank0_only_collective"
# After the three updates of the first epoch rank 0 is one collective ahead of the others.
EXPECTED = {"step": 3, "phase": None, "tensor": None, "odd_ranks": (0,), "stuck": 3}
HANGS = True


class Trainer:
    def __init__(self, args):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.fixed = args.fixed
        torch.manual_seed(args.seed)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.model = DDP(net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(args.seed)
        self.x, self.held_out = (torch.randn(n, 4, generator=generator) for n in (72, 16))

    def train_epoch(self):
        self.model.train()
        for batch in self.x.split(24):
            mine = batch[self.rank :: self.world]
            loss = nn.functional.cross_entropy(self.model(mine), (mine[:, 0] > 0).long())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def evaluate(self):
        model = self.model.module if self.fixed else self.model
        model.eval()
        hits = model(self.held_out).argmax(1) == (self.held_out[:, 0] > 0)
        return hits.float().mean().item()

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch()
            if self.rank == 0:
                print(f"epoch {epoch}: accuracy {self.evaluate():.3f}")
        return self.model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return Trainer(args).fit(args.epochs), {}
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    model = Trainer(args).fit(args.epochs)
    dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
