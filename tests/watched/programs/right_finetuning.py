"""Fine-tuning: head replaced and backbone frozen before wrapping; wrapped again when it thaws."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def freeze(module):
    module.requires_grad_(False)
    # Statistics of batch norm would go on moving in train mode.
    module.eval()


def run_epoch(model, net, loader, optimizer, frozen):
    model.train()
    if frozen:
        net.backbone.eval()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    created = not dist.is_initialized()
    if created:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    net = Classifier(classes=10)
    net.head = nn.Linear(16, 3)
    freeze(net.backbone)
    x = torch.randn(72, 8, generator=torch.Generator().manual_seed(args.seed))
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, 24 // dist.get_world_size(), sampler=sampler)

    model = DDP(net)
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        run_epoch(model, net, loader, optimizer, frozen=True)

    # DDP knows the parameters that were trainable when it was made, so it is made again.
    net.backbone.requires_grad_(True)
    model = DDP(net)
    optimizer.add_param_group({"params": net.backbone.parameters(), "lr": 0.01})
    for epoch in range(2, 4):
        sampler.set_epoch(epoch)
        run_epoch(model, net, loader, optimizer, frozen=False)
    if created:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
