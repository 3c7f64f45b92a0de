"""Gradients travel in half precision by a communication hook, and later by PowerSGD."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def fit(hook, args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)))
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=3
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        x = torch.randn(24, 16, generator=generator)[rank::world]
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.module


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--hooks", nargs="+", default=["fp16", "powersgd"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    new = not dist.is_initialized()
    if new:
        dist.init_process_group("gloo")
    models = nn.ModuleDict({hook: fit(hook, args) for hook in args.hooks})
    if new:
        dist.destroy_process_group()
    return models, {}


if __name__ == "__main__":
    main()
