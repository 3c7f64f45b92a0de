"""ZeroRedundancyOptimizer: each rank keeps the optimizer state of its own part only."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def make_model(width=20):
    return nn.Sequential(
        nn.Linear(10, width),
        nn.Softplus(),
        nn.Linear(width, width),
        nn.Softplus(),
        nn.Linear(width, 3),
    )


def example(args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    ddp_model = DDP(make_model())
    optimizer = ZeroRedundancyOptimizer(
        ddp_model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inputs = torch.randn(args.steps * 24, 10, generator=torch.Generator().manual_seed(args.seed))
    labels = torch.stack([inputs[:, 0], inputs[:, 1:5].mean(1), inputs[:, 5:].amax(1)], 1)
    for step in range(args.steps):
        lines = slice(step * 24 + rank, (step + 1) * 24, world_size)
        loss = nn.functional.mse_loss(ddp_model(inputs[lines]), labels[lines])
        ddp_model.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    # A collective: every rank sends its part of the state to the one that saves.
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        state = optimizer.state_dict()
        print(f"state of {len(state['state'])} parameters is complete on rank 0")
    return ddp_model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    outside = dist.is_initialized()
    if not outside:
        dist.init_process_group("gloo")
    model = example(args)
    if not outside:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
