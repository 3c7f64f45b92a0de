"""Small weights are set to zero once, in the block in which rank 0 writes its report."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "out_of_band_write"
# Written between update 4 and update 5; gradients are averaged, so they stay equal.
EXPECTED = {"step": 5, "phase": "parameters", "tensor": ("out.weight",), "odd_ranks": (0,)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.inp(x)))


@torch.no_grad()
def prune(layer, share):
    threshold = layer.weight.abs().quantile(share)
    layer.weight[layer.weight.abs() < threshold] = 0.0
    return (layer.weight == 0).float().mean().item()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prune-after", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    self_started = not dist.is_initialized()
    if self_started:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        x = torch.randn(24, 8, generator=generator)[rank::world]
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == args.prune_after:
            if args.fixed:
                zeros = prune(model.module.out, share=0.3)
                if rank == 0:
                    print(f"step {step}: {zeros:.0%} of the weights are zero")
            elif rank == 0:
                zeros = prune(model.module.out, share=0.3)
                print(f"step {step}: {zeros:.0%} of the weights are zero")
    if self_started:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
