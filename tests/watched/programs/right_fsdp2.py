"""Fully sharded weights (FSDP2) with clipping, and a full state dict gathered on rank 0."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.stem = nn.Linear(6, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(2)])
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Net()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # After the sharding: these are the parameters that will be trained.
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(args.steps, 12, 6, generator=generator)
    y = x.square().sum(-1, keepdim=True).sqrt()
    for step in range(args.steps):
        loss = nn.functional.mse_loss(model(x[step, rank::world]), y[step, rank::world])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item() / world:.4f}, gradient norm {norm.item():.3f}")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    return model, {"saved": float(len(state))} if rank == 0 else {}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    fresh = not dist.is_initialized()
    if fresh:
        dist.init_process_group("gloo")
    result = train(args)
    if fresh:
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
