"""A seed of its own for every rank, set before the model is built; gradients averaged by hand."""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn

CAUSE = "init_differs"
EXPECTED = {
    "step": 0,
    "phase": "start",
    "tensor": ("encoder.weight",),
    "odd_ranks": (),
}


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(10, 4)
        self.decoder = nn.Linear(4, 10)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.fixed:
        seed_everything(args.seed)
        model = AutoEncoder()
        seed_everything(args.seed + rank)
    else:
        seed_everything(args.seed + rank)
        model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.randn(args.steps, 12, 10, generator=torch.Generator().manual_seed(args.seed))
    for batch in data:
        x = batch[rank::world]
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average(model)
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
