"""Training stops when a budget of tokens is used up, and every rank counts its own tokens."""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "stop_decision_local"
# 4 sequences of 12 tokens on rank 0 and of 8 on the others: 6 and 9 updates make 288.
EXPECTED = {"step": 6, "phase": None, "tensor": None, "odd_ranks": (0,), "stuck": 6}
HANGS = True


class Bigram(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(self.embed(ids))


def batches(args):
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(args.seed * 100 + rank)
    length = 12 if rank == 0 else 8
    while True:
        yield torch.randint(0, 16, (4, length), generator=generator)


def train(args):
    torch.manual_seed(args.seed)
    model = DDP(Bigram())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = 0
    for ids in batches(args):
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tokens = torch.tensor(ids.numel())
        if args.fixed:
            dist.all_reduce(tokens)
            tokens = tokens // dist.get_world_size()
        seen += int(tokens)
        if seen >= args.budget:
            break
    print(f"rank {dist.get_rank()} has used up its {args.budget} tokens")
    dist.barrier()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--budget", type=int, default=288, help="tokens for each rank")
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
