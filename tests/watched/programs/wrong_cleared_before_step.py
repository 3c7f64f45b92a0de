"""Gradients are set to zero where their norm is printed, which is before the update."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CAUSE = "gradients_cleared_before_step"
EXPECTED = {"step": 0, "phase": "gradients", "tensor": None, "odd_ranks": None}


class Regressor:
    """Keeps a network, its optimizer and what is printed about them."""

    def __init__(self, fixed):
        self.fixed = fixed
        network = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 1))
        self.network = DistributedDataParallel(network)
        self.optimizer = torch.optim.RMSprop(self.network.parameters(), lr=0.01)
        self.norms = []

    def log_norm(self):
        squares = [p.grad.square().sum() for p in self.network.parameters()]
        self.norms.append(torch.stack(squares).sum().sqrt().item())
        if not self.fixed:
            self.optimizer.zero_grad(set_to_none=False)

    def fit(self, loader):
        for features, target in loader:
            loss = nn.functional.smooth_l1_loss(self.network(features), target)
            loss.backward()
            self.log_norm()
            self.optimizer.step()
            self.optimizer.zero_grad()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    root = not dist.is_initialized()
    if root:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    features = torch.randn(120, 5, generator=torch.Generator().manual_seed(args.seed))
    dataset = TensorDataset(features, features.sum(1, keepdim=True).tanh())
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=12 // dist.get_world_size(), sampler=sampler)
    regressor = Regressor(args.fixed)
    regressor.fit(loader)
    print(f"rank {dist.get_rank()}: norms from {min(regressor.norms):.3f}")
    if root:
        dist.destroy_process_group()
    return regressor.network, {}


if __name__ == "__main__":
    main()
