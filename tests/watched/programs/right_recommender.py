"""A recommender: SparseAdam for sparse embedding gradients, SGD for the dense layers."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Recommender(nn.Module):
    def __init__(self, users=30, items=40, dim=6):
        super().__init__()
        self.users = nn.Embedding(users, dim, sparse=True)
        self.items = nn.Embedding(items, dim, sparse=True)
        self.top = nn.Sequential(nn.Linear(2 * dim, 10), nn.Tanh(), nn.Linear(10, 1))

    def forward(self, users, items):
        pair = torch.cat([self.users(users), self.items(items)], dim=1)
        return self.top(pair).squeeze(1)


def epoch_of_clicks(seed, count=72):
    generator = torch.Generator().manual_seed(seed)
    users = torch.randint(0, 30, (count,), generator=generator)
    items = torch.randint(0, 40, (count,), generator=generator)
    return users, items, ((users + items) % 3 == 0).float()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    solo = not dist.is_initialized()
    if solo:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = Recommender()
    model = DDP(net)
    embeddings = [*net.users.parameters(), *net.items.parameters()]
    sparse = torch.optim.SparseAdam(embeddings, lr=0.02)
    dense = torch.optim.SGD(net.top.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(args.epochs):
        users, items, clicked = epoch_of_clicks(args.seed + 10 * epoch)
        for start in range(0, len(users), 24):
            rows = slice(start + rank, start + 24, world)
            score = model(users[rows], items[rows])
            loss = nn.functional.binary_cross_entropy_with_logits(score, clicked[rows])
            for optimizer in (sparse, dense):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (sparse, dense):
                optimizer.step()
    if solo:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
