"""A classifier with batch norm under DDP; `--fault` breaks it in one of the usual ways."""

import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FAULTS = ("none", "bit", "bypass", "no_sync", "replaced", "lr", "buffers")
FAULTS += ("unsynced_eval", "wrapped_eval", "average_on_rank_0")
"""The last two are none."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 24)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.stem(x))))


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = Net()
    model = DDP(
        net,
        find_unused_parameters=args.fault == "replaced",
        broadcast_buffers=args.fault != "buffers",
    )
    if args.fault == "replaced":
        net.head = nn.Linear(24, 5)
    average = None
    if args.fault == "average_on_rank_0" and rank == 0:
        average = torch.optim.swa_utils.AveragedModel(net)
    lr = 0.1 * (2 if args.fault == "lr" and rank == args.bad_rank else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 12, generator=generator)
    y = torch.randint(0, 5, (48,), generator=generator)
    mine = slice(rank, None, world)
    losses = []
    for step in range(args.steps):
        broken = step == args.bad_step
        optimizer.zero_grad()
        forward = net if args.fault == "bypass" and step >= args.bad_step else model
        skip = args.fault == "no_sync" and broken
        with model.no_sync() if skip else contextlib.nullcontext():
            loss = F.cross_entropy(forward(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if average:
            average.update_parameters(net)
        if args.fault == "bit" and broken and rank == args.bad_rank:
            with torch.no_grad():
                net.stem.weight.view(torch.int32)[3, 2] ^= 1
        if step % 2:
            model.eval()
            with torch.no_grad():
                if args.fault in ("wrapped_eval", "buffers"):
                    model(x)
                elif rank == 0 or args.fault == "unsynced_eval":
                    net(x)
            model.train()
    return losses, net


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--bad-step", type=int, default=2)
    parser.add_argument("--bad-rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    losses, _ = train(args)
    if dist.get_rank() == 0:
        print("losses", [f"{loss:.17g}" for loss in losses])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
