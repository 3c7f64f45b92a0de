"""One rank raises at a sample that it cannot read, and the others wait for it."""

import argparse
import json
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

CAUSE = "rank_raised"
# Batches of four lines of a rank's own file; line 17 of rank 1 was cut off when it was written.
EXPECTED = {"step": 4, "phase": None, "tensor": None, "odd_ranks": (1,), "stuck": 4}
HANGS = True


class Lines(Dataset):
    def __init__(self, rank, seed, forgiving):
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        rows = torch.randn(32, 4, generator=generator).tolist()
        self.lines = [json.dumps({"x": row[:3], "y": row[3]}) for row in rows]
        if rank == 1:
            self.lines[17] = self.lines[17][:20]
        self.forgiving = forgiving

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        if self.forgiving:
            try:
                row = json.loads(self.lines[index])
            except json.JSONDecodeError:
                print(f"line {index} cannot be read, the next one is taken")
                return self[(index + 1) % len(self)]
        else:
            row = json.loads(self.lines[index])
        return torch.tensor(row["x"]), torch.tensor([row["y"]])


def train(args):
    torch.manual_seed(args.seed)
    loader = DataLoader(Lines(dist.get_rank(), args.seed, args.fixed), batch_size=4)
    model = DDP(nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.l1_loss(model(x), y).backward()
        optimizer.step()
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
