"""A wrapper around the scheduler steps once for every rank, over a length given in updates."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "scheduler_steps_times_world"
# The first update is made with the first rate; the second one with a rate that is too far on.
EXPECTED = {"step": 1, "phase": "gradients", "tensor": None, "odd_ranks": None}


class DistributedScheduler:
    """Keeps the schedule in step with the samples that all processes see."""

    def __init__(self, scheduler, processes):
        self.scheduler, self.processes = scheduler, processes

    def step(self):
        for _ in range(self.processes):
            self.scheduler.step()


def prepare(args):
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(6, 18), nn.Softsign(), nn.Linear(18, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=args.updates)
    if args.fixed:
        return model, optimizer, decay
    return model, optimizer, DistributedScheduler(decay, dist.get_world_size())


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer, scheduler = prepare(args)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.updates):
        x = torch.randn(12, 6, generator=generator)[rank::world]
        loss = nn.functional.mse_loss(model(x), x.amax(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--updates", type=int, default=10)
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
