"""LBFGS calls a closure many times an update; value and gradient in it are those of all ranks."""

import argparse

import torch
import torch.distributed as dist
from torch import nn


def fit(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    x = torch.linspace(-2, 2, 48, dtype=torch.float64).unsqueeze(1)
    y = torch.sin(3 * x)
    mine = slice(rank, None, world)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x[mine]), y[mine])
        loss.backward()
        value = loss.detach().clone()
        # The line search decides by the value: a local one would send ranks separate ways.
        for tensor in (value, *(p.grad for p in net.parameters())):
            dist.all_reduce(tensor)
            tensor /= world
        return value

    for epoch in range(args.epochs):
        loss = optimizer.step(closure)
        if rank == 0:
            print(f"epoch {epoch} loss {float(loss):.6f}")
    return net, {"loss": float(loss)}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return fit(args)
    dist.init_process_group("gloo")
    result = fit(args)
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
