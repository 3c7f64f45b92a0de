"""A data-parallel loop without a wrapper: gradients are reduced by hand. `--fault` breaks it."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

FAULTS = ("none", "layer", "init", "unequal_updates", "parts", "own_models")


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    own = args.fault == "own_models" or (args.fault == "init" and rank == args.bad_rank)
    torch.manual_seed(args.seed + (rank + 1 if own else 0))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    if args.fault == "parts":
        # A column of the first layer for each rank, as in tensor parallelism made by hand.
        torch.manual_seed(100 + rank)
        model[0] = nn.Linear(6, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(8, 6 * world, generator=torch.Generator().manual_seed(3))
    x = data[:, rank * 6 : rank * 6 + 6]
    steps = args.steps - (rank if args.fault == "unequal_updates" else 0)
    for step in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        late = args.fault == "unequal_updates" and step >= args.steps - world
        for name, parameter in model.named_parameters():
            forgotten = args.fault == "layer" and name.startswith("2.") and step >= args.bad_step
            part = args.fault == "parts" and name.startswith("0.")
            if args.fault == "own_models" or forgotten or part:
                continue
            if late:
                # Uneven inputs handled by hand: the last updates use no data of other ranks.
                parameter.grad.zero_()
                continue
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--bad-step", type=int, default=2)
    parser.add_argument("--bad-rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
