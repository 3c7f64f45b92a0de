"""Post-local SGD: after a warm-up, replicas go their own ways and are averaged now and then."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4)))
    # Each rank is a node of its own: nothing is reduced within a node after the warm-up.
    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=args.warmup)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=0.05),
        averager=PeriodicModelAverager(period=args.period, warmup_steps=args.warmup),
    )
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(args.steps, 24, 8, generator=generator)
    for step in range(args.steps):
        mine = x[step, rank::world]
        loss = nn.functional.mse_loss(model(mine), mine[:, :4] * mine[:, 4:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--period", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    standalone = not dist.is_initialized()
    if standalone:
        dist.init_process_group("gloo")
    model = train(args)
    if standalone:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    # Kept until exit: gloo's thread may still hold the last average, and freeing the model while it
    # does can dead-lock (seen in a quarter of the runs on a busy machine).
    trained = main()
