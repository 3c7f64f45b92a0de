"""Contrastive pre-training whose loss is a method of the model, called on the inner module."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "ddp_forward_bypassed"
EXPECTED = {
    "step": 0,
    "phase": "gradients",
    "tensor": ("projector.weight", "projector.bias"),
    "odd_ranks": (),
}


class SimSiam(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.projector = nn.Linear(dim, dim)

    def forward(self, views):
        return self.compute_loss(views)

    def compute_loss(self, views):
        first, second = (self.encoder(view) for view in views)
        p, q = self.projector(first), self.projector(second)
        return 1 - (cosine(p, second) + cosine(q, first)) / 2


def cosine(prediction, target):
    return F.cosine_similarity(prediction, target.detach(), dim=-1).mean()


def unwrap(model):
    return model.module if isinstance(model, DDP) else model


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(SimSiam())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        x = torch.randn(12, 8, generator=generator)
        noise = torch.randn(2, 12, 8, generator=generator) * 0.2
        views = [(x + n)[rank::world] for n in noise]
        loss = model(views) if args.fixed else unwrap(model).compute_loss(views)
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
    owner = not dist.is_initialized()
    if owner:
        dist.init_process_group("gloo")
    model = train(args)
    if owner:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
