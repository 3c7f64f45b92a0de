"""Weights are averaged every few updates, in one vector; in between every rank trains alone."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def average(model):
    flat = parameters_to_vector(model.parameters()).detach()
    dist.all_reduce(flat)
    vector_to_parameters(flat / dist.get_world_size(), model.parameters())


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--local-steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    root = not dist.is_initialized()
    if root:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # Every rank draws from a distribution of its own.
    generator = torch.Generator().manual_seed(1000 * args.seed + dist.get_rank())
    for _ in range(args.rounds):
        for _ in range(args.local_steps):
            x = torch.randn(8, 6, generator=generator) + dist.get_rank()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        average(model)
    print(f"rank {dist.get_rank()}: {loss.item():.4f}")
    if root:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
