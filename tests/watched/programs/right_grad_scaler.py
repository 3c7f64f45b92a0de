"""Mixed precision with a GradScaler whose first scale overflows: all ranks skip together."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.conv = nn.Conv1d(12, 12, 3, padding=1)
        self.out = nn.Linear(12, 4)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        return self.out(F.gelu(self.conv(x)).transpose(1, 2))


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(0, 20, (args.steps, 12, 6), generator=generator)
    skipped = 0
    for step in range(args.steps):
        batch = ids[step, rank::world]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten() % 4)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        # Gradients are reduced before they are looked at, so all ranks see the same overflow.
        skipped += scaler.get_scale() < before
    return model, {"skipped": float(skipped), "scale": scaler.get_scale()}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return train(args)
    dist.init_process_group("gloo")
    result = train(args)
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
