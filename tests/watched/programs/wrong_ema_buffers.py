"""An average of weights and buffers is kept on every rank, and scored by all of them together."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

CAUSE = "ema_buffers_local"
# The average is used for the first time after five updates.
EXPECTED = {
    "step": 5,
    "phase": "evaluation",
    "tensor": ("norm.running_mean", "norm.running_var"),
    "odd_ranks": (),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 10)
        self.norm = nn.BatchNorm1d(10)
        self.out = nn.Linear(10, 1)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.inp(x))))


def share_buffers(model):
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(dist.get_world_size())


@torch.no_grad()
def score(ema, held_out):
    mine = held_out[dist.get_rank() :: dist.get_world_size()]
    ema.eval()
    total = (ema(mine) - mine.mean(1, keepdim=True)).abs().sum()
    dist.all_reduce(total)
    return total.item() / len(held_out)


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(Net())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    held_out = torch.randn(24, 5, generator=generator)
    for step in range(args.steps):
        x = torch.randn(24, 5, generator=generator)[rank::world]
        loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.fixed:
            share_buffers(model)
        ema.update_parameters(model.module)
        if (step + 1) % 5 == 0:
            error = score(ema, held_out)
            print(f"step {step}: error of the average {error:.4f}")
    return ema, {"error": error}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
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
