"""A stream that is split by rank and by worker; the loader forks two workers."""

import argparse
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Events(IterableDataset):
    """Sample k of the stream goes to rank k % world, and there to worker (k // world) % workers."""

    def __init__(self, length, rank, world):
        self.length, self.rank, self.world = length, rank, world
        self.epoch = 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first = self.rank + self.world * worker
        for index in itertools.islice(itertools.count(first, self.world * workers), self.length):
            if index >= self.length:
                return
            generator = torch.Generator().manual_seed(1000 * self.epoch + index)
            x = torch.randn(8, generator=generator)
            yield x, (x[0] * x[1] > 0).long()


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    events = Events(args.samples, rank, world)
    for epoch in range(args.epochs):
        events.epoch = epoch
        # A batch comes from one worker; ranks of equal shards have equally many batches.
        loader = DataLoader(events, batch_size=args.batch // world, num_workers=2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo")
    model = train(args)
    if alone:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
