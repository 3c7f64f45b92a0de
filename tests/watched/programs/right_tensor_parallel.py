"""Tensor parallelism by hand: a column-split and a row-split layer, everything else replicated."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CopyToRanks(torch.autograd.Function):
    """The identity; the gradients of what each rank computes from it are summed."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelMLP(nn.Module):
    def __init__(self, dim, hidden, rank, world):
        super().__init__()
        # Drawn as a whole, so that the model does not depend on the number of ranks.
        up, down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.up_weight = nn.Parameter(up.weight.detach().chunk(world, 0)[rank].clone())
        self.up_bias = nn.Parameter(up.bias.detach().chunk(world)[rank].clone())
        self.down_weight = nn.Parameter(down.weight.detach().chunk(world, 1)[rank].clone())
        self.down_bias = down.bias

    def forward(self, x):
        x = CopyToRanks.apply(x)
        hidden = F.gelu(F.linear(x, self.up_weight, self.up_bias))
        return SumOverRanks.apply(F.linear(hidden, self.down_weight)) + self.down_bias


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = ParallelMLP(8, 24, rank, world)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x + self.mlp(self.norm(x)))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    initialised = dist.is_initialized()
    if not initialised:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = Net(rank, world)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(args.seed)
    # All ranks of a tensor-parallel group see the same samples.
    x = torch.randn(args.steps, 12, 8, generator=generator)
    for batch in x:
        loss = F.cross_entropy(net(batch), batch[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if not initialised:
        dist.destroy_process_group()
    return net, {"loss": loss.item()}


if __name__ == "__main__":
    main()
