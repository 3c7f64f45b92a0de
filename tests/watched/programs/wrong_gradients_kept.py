"""Gradients are cleared at the beginning of an epoch, and add up within it."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CAUSE = "gradients_not_cleared"
# The second update is the first one to be made with more than its own gradient.
EXPECTED = {"step": 1, "phase": "gradients", "tensor": None, "odd_ranks": None}


def train_one_epoch(model, loader, optimizer, fixed):
    model.train()
    optimizer.zero_grad()
    running = 0.0
    for inputs, target in loader:
        if fixed:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), target)
        loss.backward()
        optimizer.step()
        running += loss.item()
    return running / len(loader)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    root = not dist.is_initialized()
    if root:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    x = torch.randn(96, 7, generator=torch.Generator().manual_seed(args.seed))
    dataset = TensorDataset(x, (x[:, :2] + x[:, 2:4] > 0).float())
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=24 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(7, 14), nn.Tanh(), nn.Linear(14, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mean = train_one_epoch(model, loader, optimizer, args.fixed)
        print(f"[{dist.get_rank()}] epoch {epoch} {mean:.4f}")
    if root:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
