"""A layer of a megabyte, of which a quarter is read at an update; `--fault` breaks one element."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULTS = ("none", "element", "spread")


def train(args):
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(args.steps):
        optimizer.zero_grad()
        model(torch.randn(4, 256)).square().mean().backward()
        if args.fault != "none" and step == args.bad_step and dist.get_rank() == args.bad_rank:
            with torch.no_grad():
                weight = model.module[0].weight
                (weight[1000, 7:8] if args.fault == "element" else weight).add_(1e-3)
        optimizer.step()
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--bad-step", type=int, default=10)
    parser.add_argument("--bad-rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
