"""Batch norm without broadcast buffers, for speed; every rank validates its share."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "bn_stats_local"
# The first validation comes after the four updates of the first epoch.
EXPECTED = {
    "step": 4,
    "phase": "evaluation",
    "tensor": ("norm.running_mean", "norm.running_var"),
    "odd_ranks": (),
}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.out = nn.Linear(12, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.lift(x))))


def average_buffers(model):
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    error = nn.functional.mse_loss(model(x), y, reduction="sum")
    dist.all_reduce(error)
    model.train()
    return error.item()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    launched = not dist.is_initialized()
    if launched:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(Encoder(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(args.seed)
    x, held_out = torch.randn(96, 6, generator=generator), torch.randn(24, 6, generator=generator)
    for epoch in range(args.epochs):
        for batch in x.split(24):
            part = batch[rank::world]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(part), part[:, :2].sin()).backward()
            optimizer.step()
        if args.fixed:
            average_buffers(model)
        share = held_out[rank::world]
        error = validate(model, share, share[:, :2].sin())
        if rank == 0:
            print(f"epoch {epoch} validation error {error / held_out.numel():.4f}")
    if launched:
        dist.destroy_process_group()
    return model, {"error": error}


if __name__ == "__main__":
    main()
