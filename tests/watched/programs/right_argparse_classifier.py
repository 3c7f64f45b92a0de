"""Image-like classification: batch norm, sampler, validation on rank 0 through `.module`."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ConvNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.classifier = nn.Linear(24, classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def pictures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    noise = torch.randn(count, 1, 6, 6, generator=generator)
    return TensorDataset(noise + labels.view(-1, 1, 1, 1) * 0.5, labels)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    right = total = 0
    for x, y in loader:
        right += (model(x).argmax(1) == y).sum().item()
        total += len(y)
    model.train()
    return right / total


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=24, help="over all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    owner = not dist.is_initialized()
    if owner:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, valid_set = pictures(72, seed=1), pictures(30, seed=2)
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size // world_size, sampler=sampler)
    valid_loader = DataLoader(valid_set, batch_size=10)

    model = DDP(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    accuracy = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        if rank == 0:
            accuracy = validate(model.module, valid_loader)
            print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.3f}")
        dist.barrier()
    if owner:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
