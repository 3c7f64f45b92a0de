"""The main_worker style: AverageMeter, sharded validation with all-reduced counts, best score."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn

parser = argparse.ArgumentParser(description="Training in the style of the ImageNet example")
parser.add_argument("-b", "--batch-size", default=24, type=int)
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("--lr", default=0.02, type=float)
parser.add_argument("--seed", default=0, type=int)
parser.add_argument("-p", "--print-freq", default=2, type=int)

best_acc1 = 0.0


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def main(argv=None):
    args = parser.parse_args(argv)
    args.own_group = not dist.is_initialized()
    return main_worker(args)


def main_worker(args):
    global best_acc1
    best_acc1 = 0.0
    if args.own_group:
        dist.init_process_group("gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.LayerNorm(24), nn.GELU())
    model.append(nn.Linear(24, 5))
    args.batch_size = int(args.batch_size / args.world_size)
    model = torch.nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.3)

    train_dataset, val_dataset = fake_data(72, 11), fake_data(26, 12)
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, seed=args.seed)
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, sampler=train_sampler
    )
    # The samples that a sampler would repeat in order to fill up are not counted twice.
    mine = torch.utils.data.Subset(val_dataset, range(args.rank, len(val_dataset), args.world_size))
    val_loader = torch.utils.data.DataLoader(mine, batch_size=4)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, args)
        acc1 = validate(val_loader, model, args)
        scheduler.step()
        best_acc1 = max(acc1, best_acc1)
    if args.own_group:
        dist.destroy_process_group()
    return model, {"acc1": acc1, "best_acc1": best_acc1}


def fake_data(size, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 5, (size,), generator=generator)
    images = torch.randn(size, 1, 6, 6, generator=generator) + 0.3 * target.view(-1, 1, 1, 1)
    return torch.utils.data.TensorDataset(images, target)


def train(loader, model, criterion, optimizer, args):
    losses = AverageMeter("Loss")
    model.train()
    for i, (images, target) in enumerate(loader):
        loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0 and args.rank == 0:
            print(f"[{i}/{len(loader)}] {losses.name} {losses.avg:.3f}")


@torch.no_grad()
def validate(loader, model, args):
    top1 = AverageMeter("Acc@1")
    # Shards may have different numbers of batches, so the wrapper is left out of it.
    net = model.module.eval()
    for images, target in loader:
        correct = net(images).argmax(1) == target
        top1.update(correct.float().mean().item(), images.size(0))
    top1.all_reduce()
    model.train()
    return top1.avg


if __name__ == "__main__":
    main()
