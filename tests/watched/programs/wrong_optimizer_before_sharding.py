"""The optimizer is made before the model is sharded, and goes on with the parameters of then."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CAUSE = "stale_optimizer"
EXPECTED = {"step": 0, "phase": "parameters", "tensor": None, "odd_ranks": None}


def build(args):
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU())
    model.append(nn.Linear(24, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if args.fixed:
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        fully_shard(model, mesh=mesh)
    return model, optimizer


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(args)
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        x = torch.randn(12, 6, generator=generator)[rank::world]
        loss = nn.functional.mse_loss(model(x), x[:, :2] * x[:, 2:4])
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 3 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    outer = not dist.is_initialized()
    if outer:
        dist.init_process_group("gloo")
    model = train(args)
    if outer:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
