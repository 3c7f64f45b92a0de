"""A language model: padded sequences, tied embeddings, loss over all tokens of all ranks."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PAD = 0


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class LM(nn.Module):
    def __init__(self, vocab=17, dim=16, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim, padding_idx=PAD), nn.Embedding(16, dim)
        self.blocks = nn.ModuleList(Block(dim, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def corpus(count, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 17, (count, 13), generator=generator)
    lengths = torch.randint(4, 14, (count, 1), generator=generator)
    return rows.masked_fill(torch.arange(13) >= lengths, PAD)


def get_lr(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / (args.steps - args.warmup)
    return args.lr * 0.5 * (1 + math.cos(math.pi * done))


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(LM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    ids = corpus(args.steps * 12, args.seed)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, args)
        batch = ids[step * 12 : step * 12 + 12][rank::world]
        inputs, labels = batch[:, :-1], batch[:, 1:]
        tokens = (labels != PAD).sum()
        dist.all_reduce(tokens)
        logits = model(inputs)
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum"
        )
        # DDP averages over ranks, and the mean is to be one over all tokens.
        (loss * world / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    ddp = not dist.is_initialized()
    if ddp:
        dist.init_process_group("gloo")
    model = train(args)
    if ddp:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
