"""Tensor and sequence parallelism by hand: the norm sees a part of the sequence on every rank."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CAUSE = "replicated_grad_not_reduced"
EXPECTED = {
    "step": 0,
    "phase": "gradients",
    "tensor": ("norm.weight", "norm.bias"),
    "odd_ranks": (),
}


class GatherSequence(torch.autograd.Function):
    """The whole sequence from its parts; backward sums what the ranks have for one part."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class ReduceOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelBlock(nn.Module):
    def __init__(self, dim=8, hidden=24, classes=3):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        up, down = torch.randn(hidden, dim) * 0.3, torch.randn(dim, hidden) * 0.2
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Parameter(up.chunk(world, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        part = x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
        whole = GatherSequence.apply(self.norm(part))
        hidden = F.gelu(F.linear(whole, self.up))
        out = ReduceOutput.apply(F.linear(hidden, self.down))
        return self.head(out.mean(1))


def train(args):
    torch.manual_seed(args.seed)
    model = ParallelBlock()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    # All ranks work on the same sequences, of twelve positions.
    data = torch.randn(args.steps, 6, 12, 8, generator=torch.Generator().manual_seed(args.seed))
    for x in data:
        loss = F.cross_entropy(model(x), x.sum(1)[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        if args.fixed:
            for parameter in model.norm.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
    return model, {"loss": loss.item()}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return train(args)
    dist.init_process_group("gloo")
    result = train(args)
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
