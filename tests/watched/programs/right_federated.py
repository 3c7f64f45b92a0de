"""Federated averaging: local epochs with a new optimizer each round, then a mean by samples."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


def local_training(model, x, y, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def averaged(model, samples):
    """The state of all clients, each with the weight of its samples."""
    total = torch.tensor(float(samples))
    dist.all_reduce(total)
    state = {}
    for name, value in model.state_dict().items():
        share = value.double() * (samples / total) if value.is_floating_point() else value.clone()
        kind = dist.ReduceOp.SUM if value.is_floating_point() else dist.ReduceOp.MAX
        dist.all_reduce(share, op=kind)
        state[name] = share.to(value.dtype)
    return state


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--local-steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    # A client has samples of its own, and not as many as the others.
    samples = 24 + 8 * rank
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(100 * args.seed + rank))
    y = x[:, :3].argmax(1)
    for _ in range(args.rounds):
        local_training(model, x, y, args.local_steps)
        model.load_state_dict(averaged(model, samples))
        model.eval()
        with torch.no_grad():
            right = (model(x).argmax(1) == y).sum()
        dist.all_reduce(right)
    if own:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
