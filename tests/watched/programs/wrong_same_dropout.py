"""The same seed on all ranks, also after the model is built: all ranks drop the same units."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "rng_not_decorrelated"
EXPECTED = {"step": 0, "phase": None, "tensor": None, "odd_ranks": None}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(25, 16)
        self.drop = nn.Dropout(0.4)
        self.out = nn.Linear(16, 5)

    def forward(self, ids):
        return self.out(self.drop(self.embed(ids)))


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(Tagger())
    if args.fixed:
        torch.manual_seed(args.seed + 1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        ids = torch.randint(0, 25, (12, 4), generator=generator)[rank::world]
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
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
