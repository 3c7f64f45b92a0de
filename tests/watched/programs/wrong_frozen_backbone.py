"""A frozen backbone with batch norm stays in train mode while a head learns on top of it."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "frozen_module_changes"
# The very first forward pass moves the statistics.
EXPECTED = {
    "step": 0,
    "phase": None,
    "tensor": (
        "backbone.1.running_mean",
        "backbone.1.running_var",
        "backbone.1.num_batches_tracked",
    ),
    "odd_ranks": None,
}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


@torch.no_grad()
def features(net, probe):
    training = net.training
    result = net.eval().backbone(probe)
    net.train(training)
    return result


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = Detector()
    net.backbone.requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.Adam((p for p in net.parameters() if p.requires_grad), lr=0.02)
    generator = torch.Generator().manual_seed(args.seed)
    probe = torch.randn(8, 6, generator=generator)
    before = features(net, probe)
    for _ in range(args.steps):
        x = 1.0 + torch.randn(24, 6, generator=generator)[rank::world]
        model.train()
        if args.fixed:
            net.backbone.eval()
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > x[:, 1]).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drift = (features(net, probe) - before).norm() / before.norm()
    return model, {"drift": drift.item()}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=7)
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
