"""Evolution strategy: the ranks draw and score different weights, and apply the same update."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def fitness(net, vector, x, y):
    vector_to_parameters(vector, net.parameters())
    with torch.no_grad():
        return -(net(x).squeeze(1) - y).square().mean()


def evolve(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(args.seed))
    y = x.prod(1)
    for generation in range(args.generations):
        centre = parameters_to_vector(net.parameters()).detach().clone()
        # All candidates of a generation are drawn on all ranks, each rank scores its share.
        noise = torch.randn(args.population, len(centre))
        scores = torch.zeros(args.population)
        for candidate in range(rank, args.population, world):
            scores[candidate] = fitness(net, centre + args.sigma * noise[candidate], x, y)
        vector_to_parameters(centre, net.parameters())
        dist.all_reduce(scores)
        weights = (scores - scores.mean()) / (scores.std() + 1e-8)
        gradient = -(weights @ noise) / (args.population * args.sigma)
        offset = 0
        for parameter in net.parameters():
            size = parameter.numel()
            parameter.grad = gradient[offset : offset + size].view_as(parameter).clone()
            offset += size
        optimizer.step()
        if rank == 0 and generation % 3 == 0:
            print(f"generation {generation}: best {scores.max().item():.4f}")
    return net


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--population", type=int, default=24)
    parser.add_argument("--sigma", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return evolve(args), {}
    dist.init_process_group("gloo")
    net = evolve(args)
    dist.destroy_process_group()
    return net, {}


if __name__ == "__main__":
    main()
