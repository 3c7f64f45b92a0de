"""A DistributedSampler that is never told the epoch: the same order again and again."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CAUSE = "set_epoch_missing"
# Three updates an epoch; the first epoch is as it should be.
EXPECTED = {"step": 3, "phase": None, "tensor": None, "odd_ranks": None}


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.hidden(x)))).squeeze(1)


def train(args):
    torch.manual_seed(args.seed)
    x = torch.rand(72, 3, generator=torch.Generator().manual_seed(args.seed)) * 4
    dataset = TensorDataset(x, torch.sin(x).prod(1))
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, 24 // dist.get_world_size(), sampler=sampler)
    model = DDP(Regressor())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        if args.fixed:
            sampler.set_epoch(epoch)
        for inputs, target in loader:
            loss = nn.functional.mse_loss(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of the last batch {loss.item():.4f}")
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo")
    model = train(args)
    if mine:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
