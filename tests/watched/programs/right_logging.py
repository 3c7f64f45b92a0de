"""Rank 0 writes event files; the script changes directory and has an excepthook of its own."""

import argparse
import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SummaryWriter:
    """Scalars and histograms of one run, a JSON line each."""

    def __init__(self, path):
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115, PTH123

    def add_scalar(self, tag, value, step):
        self._write(tag, step, float(value))

    def add_histogram(self, tag, values, step):
        self._write(tag, step, torch.histc(values.detach().float(), 5).tolist())

    def _write(self, tag, step, value):
        line = {"tag": tag, "step": step, "wall": time.time(), "value": value}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def close(self):
        self.file.close()


def report_and_die(kind, error, trace):
    print(f"training failed on rank {os.environ.get('RANK')}: {error}", file=sys.stderr)
    sys.__excepthook__(kind, error, trace)


def main(argv=None):
    sys.excepthook = report_and_die
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    group = not dist.is_initialized()
    if group:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = tempfile.mkdtemp(prefix="run-")
    os.chdir(folder)
    writer = SummaryWriter("events.jsonl") if rank == 0 else None

    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(4, 10), nn.CELU(), nn.Linear(10, 2)))
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(args.seed))
    dataset = TensorDataset(x, x[:, :2] / (1 + x[:, 2:].square()))
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, 24 // world, sampler=sampler, num_workers=args.workers)
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            loss = nn.functional.mse_loss(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            if writer:
                # Of this rank only, and said so.
                writer.add_scalar("train/loss_rank0", loss.item(), step)
                for name, parameter in model.module.named_parameters():
                    writer.add_histogram(f"grad/{name}", parameter.grad, step)
            optimizer.step()
            step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if writer:
            writer.add_scalar("epoch/loss", mean.item() / world, epoch)
    if writer:
        writer.close()
        os.remove("events.jsonl")  # noqa: PTH107
    os.chdir("/")
    os.rmdir(folder)  # noqa: PTH106
    if group:
        dist.destroy_process_group()
    return model, {"loss": mean.item() / world}


if __name__ == "__main__":
    main()
