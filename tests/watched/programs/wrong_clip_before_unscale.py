"""Mixed precision with clipping: the threshold meets gradients that are still scaled."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "clip_before_unscale"
EXPECTED = {"step": 0, "phase": "gradients", "tensor": None, "odd_ranks": None}


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(8, 24), nn.ELU(), nn.Linear(24, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        x = torch.randn(24, 8, generator=generator)[rank::world]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if args.fixed:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return train(args), {}
    dist.init_process_group("gloo")
    model = train(args)
    dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
