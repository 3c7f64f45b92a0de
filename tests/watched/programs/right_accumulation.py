"""Gradient accumulation: no_sync around forward and backward of all micro-batches but the last."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def micro_batches(args, rank, world):
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(args.updates, args.accum, 12, 5, generator=generator)
    for window in x:
        yield [(micro[rank::world], micro[rank::world].abs().amax(1)) for micro in window]


def fit(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(5, 24), nn.Sigmoid(), nn.Linear(24, 24), nn.Sigmoid())
    net.append(nn.Linear(24, 1))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for window in micro_batches(args, rank, world):
        for index, (x, y) in enumerate(window):
            last = index == len(window) - 1
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.l1_loss(model(x).squeeze(1), y)
                (loss / len(window)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--accum", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    model = fit(args)
    if own:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
