"""Gradients are averaged by hand, after every rank has clipped its own."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

CAUSE = "clip_before_average"
# No gradient of this loss is as small as the threshold, so every update is clipped.
EXPECTED = {"step": 0, "phase": "gradients", "tensor": None, "odd_ranks": None}


def all_reduce_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


def training_step(model, optimizer, x, y, args):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    if args.fixed:
        all_reduce_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        all_reduce_gradients(model)
    optimizer.step()
    return loss.item()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--clip", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    distributed = not dist.is_initialized()
    if distributed:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        x = torch.randn(12, 6, generator=generator)
        # Large targets: the loss is far from its minimum all the time.
        y = 5.0 + x[:, :2] * x[:, 2:4]
        loss = training_step(model, optimizer, x[rank::world], y[rank::world], args)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss:.3f}")
    if distributed:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
