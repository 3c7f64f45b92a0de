"""ReduceLROnPlateau and early stopping, both on a validation loss that all ranks share."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def all_mean(total, count):
    both = torch.tensor([float(total), float(count)], dtype=torch.float64)
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def __call__(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, value)
        return self.bad > self.patience


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    stopping = EarlyStopping(args.patience)
    generator = torch.Generator().manual_seed(args.seed)
    x, valid = (torch.randn(24, 3, generator=generator) for _ in range(2))
    mine, checked = x[rank::world], valid[rank::world]
    for epoch in range(args.epochs):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True).cos()).backward()
        optimizer.step()
        with torch.no_grad():
            error = model.module(checked) - checked.sum(1, keepdim=True).cos()
        valid_loss = all_mean(error.square().sum(), error.numel())
        plateau.step(valid_loss)
        if stopping(valid_loss):
            print(f"rank {rank} stops after epoch {epoch}")
            break
    return model, {"valid_loss": valid_loss, "lr": optimizer.param_groups[0]["lr"]}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--patience", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return train(args)
    dist.init_process_group("gloo")
    result = train(args)
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
