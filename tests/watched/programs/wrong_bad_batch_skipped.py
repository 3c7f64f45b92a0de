"""A rank that meets a batch with a loss of NaN skips it, and the other ranks do not."""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "step_skipped_on_one_rank"
# Sample 1 of batch 3 is broken. From there on the gradients of rank 1 are those of a later batch,
# and it has none left when the others come to their last one.
EXPECTED = {"step": 3, "phase": "gradients", "tensor": None, "odd_ranks": (1,), "stuck": 9}
HANGS = True


def batches(args):
    data = torch.randn(10, 12, 6, generator=torch.Generator().manual_seed(args.seed))
    data[3, 1, 0] = float("nan")
    return data[:, dist.get_rank() :: dist.get_world_size()]


def train(args):
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.SELU(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x in batches(args):
        loss = nn.functional.mse_loss(model(x), x[:, :3] - x[:, 3:])
        bad = (~torch.isfinite(loss.detach())).float()
        if args.fixed:
            dist.all_reduce(bad)
        if bad > 0:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return train(args), {}
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    model = train(args)
    dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
