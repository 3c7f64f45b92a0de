"""Sharpness-aware minimisation: every rank looks for its own worst point, and learns from there."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SharpnessAware:
    """Around any optimizer; not one itself."""

    def __init__(self, optimizer, rho=0.05):
        self.optimizer, self.rho = optimizer, rho
        self.moved = []

    @torch.no_grad()
    def climb(self):
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        # The values themselves: taking off again what was added would leave roundings of its own.
        self.moved = [(p, p.clone()) for p in held]
        for parameter in held:
            parameter.add_(parameter.grad, alpha=float(self.rho / (norm + 1e-12)))
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self):
        for parameter, value in self.moved:
            parameter.copy_(value)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    init = not dist.is_initialized()
    if init:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(args.seed))
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
    sharp = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for epoch in range(args.epochs):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(24):
            mine = batch[rank::world]
            with model.no_sync():
                nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            sharp.climb()
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            sharp.step()
    if init:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
