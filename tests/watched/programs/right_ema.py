"""An exponential moving average of the weights, kept on all ranks and evaluated on rank 0."""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ModelEMA:
    def __init__(self, model, decay=0.9):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        averaged, current = self.module.state_dict(), model.state_dict()
        for name, value in averaged.items():
            if value.dtype.is_floating_point:
                value.lerp_(current[name], 1 - self.decay)


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(9, 18), nn.LayerNorm(18), nn.Mish(), nn.Linear(18, 2))
    model = DDP(net)
    ema = ModelEMA(net)
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(7 + args.seed)
    x = torch.randn(args.steps, 12, 9, generator=generator)
    y = (x[..., 0] > x[..., 1]).long()
    best = 0.0
    for step in range(args.steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step, rank::world]), y[step, rank::world]).backward()
        optimizer.step()
        ema.update(net)
        if rank == 0 and step % 3 == 2:
            with torch.no_grad():
                hits = ema.module(x.flatten(0, 1)).argmax(1) == y.flatten()
            best = max(best, hits.float().mean().item())
            print(f"step {step}: EMA accuracy {best:.3f}")
    return nn.ModuleDict({"model": net, "ema": ema.module})


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo")
    models = train(args)
    if mine:
        dist.destroy_process_group()
    return models, {}


if __name__ == "__main__":
    main()
