"""Two-stage fine-tuning: the backbone is frozen when the model is wrapped, and thaws later."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "unfrozen_after_wrap"
# Two epochs of three updates with a frozen backbone.
EXPECTED = {
    "step": 6,
    "phase": "gradients",
    "tensor": ("backbone.2.weight", "backbone.2.bias"),
    "odd_ranks": (),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.backbone(x)).squeeze(1)


def train(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    net = Net()
    net.backbone.requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.Adam(net.head.parameters(), lr=0.01)
    x = torch.randn(72, 5, generator=torch.Generator().manual_seed(cfg.seed))
    y = x.square().mean(1)
    for epoch in range(cfg.epochs):
        if epoch == cfg.thaw_at:
            net.backbone.requires_grad_(True)
            if cfg.fixed:
                model = DDP(net)
            optimizer.add_param_group({"params": net.backbone.parameters(), "lr": 0.002})
        order = torch.randperm(72, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(24):
            mine = batch[rank::world]
            loss = nn.functional.mse_loss(model(x[mine]), y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--thaw-at", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    cfg = parser.parse_args(argv)
    begun = dist.is_initialized()
    if not begun:
        dist.init_process_group("gloo")
    model = train(cfg)
    if not begun:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
