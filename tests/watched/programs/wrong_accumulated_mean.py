"""Accumulation over texts of unequal length: a mean of the means of the micro-batches."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "accumulation_normalisation"
EXPECTED = {"step": 0, "phase": "gradients", "tensor": None, "odd_ranks": None}
LENGTHS = (9, 3, 6)
"""Of the texts in the micro-batches of every window, so all ranks have equally many tokens."""


class Model(nn.Module):
    def __init__(self, vocab=15, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Conv1d(dim, dim, 2)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        return self.head(torch.tanh(self.mix(F.pad(x, (1, 0)))).transpose(1, 2))


def windows(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.updates):
        drawn = [torch.randint(0, 15, (12, n + 1), generator=generator) for n in LENGTHS]
        yield [ids[rank::world] for ids in drawn]


def train(args):
    world = dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    for window in windows(args):
        tokens = torch.tensor(sum(ids[:, 1:].numel() for ids in window))
        dist.all_reduce(tokens)
        for index, ids in enumerate(window):
            last = index == len(window) - 1
            with nullcontext() if last else model.no_sync():
                logits, labels = model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
                if args.fixed:
                    loss = F.cross_entropy(logits, labels, reduction="sum") * world / tokens
                else:
                    loss = F.cross_entropy(logits, labels) / len(window)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    top = not dist.is_initialized()
    if top:
        dist.init_process_group("gloo")
    model = train(args)
    if top:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
