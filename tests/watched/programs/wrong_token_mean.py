"""A language model on texts of unequal length: each rank takes the mean over its own tokens."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "token_count_local"
EXPECTED = {"step": 0, "phase": "gradients", "tensor": None, "odd_ranks": None}
IGNORED = -100


class TinyLM(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def texts(step, seed):
    """Twelve texts; every batch has short ones and long ones, whatever the number of ranks."""
    generator = torch.Generator().manual_seed(seed * 1000 + step)
    ids = torch.randint(0, 20, (12, 11), generator=generator)
    lengths = torch.tensor([11, 4, 9, 3, 10, 3, 8, 5, 11, 3, 10, 4])
    labels = ids.masked_fill(torch.arange(11) >= lengths[:, None], IGNORED)
    return ids[:, :-1], labels[:, 1:]


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(TinyLM())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(args.steps):
        ids, labels = (part[rank::world] for part in texts(step, args.seed))
        logits = model(ids).flatten(0, 1)
        if args.fixed:
            tokens = (labels != IGNORED).sum()
            dist.all_reduce(tokens)
            total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            loss = total * world / tokens
        else:
            loss = F.cross_entropy(logits, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    inner = dist.is_initialized()
    if not inner:
        dist.init_process_group("gloo")
    model = train(args)
    if not inner:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
