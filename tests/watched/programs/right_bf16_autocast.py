"""bf16 autocast around forward and loss, with a fused optimizer and label smoothing."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MLPMixer(nn.Module):
    def __init__(self, patches=4, dim=8, classes=3):
        super().__init__()
        self.patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU())
        self.channels = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())
        self.classify = nn.Linear(dim * 2 * patches, classes)

    def forward(self, x):
        x = self.patches(x.transpose(1, 2)).transpose(1, 2)
        return self.classify(self.channels(x).flatten(1))


def run(seed, epochs, batch):
    world = dist.get_world_size()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(72, 4, 8, generator=generator)
    dataset = TensorDataset(x, x.mean((1, 2)).mul(20).long().clamp(-1, 1) + 1)
    sampler = DistributedSampler(dataset, seed=seed, drop_last=True)
    loader = DataLoader(dataset, batch // world, sampler=sampler)
    model = DistributedDataParallel(MLPMixer())
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, epochs=epochs, steps_per_epoch=len(loader)
    )
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                loss = criterion(model(inputs), target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args(argv))
    inside = dist.is_initialized()
    if not inside:
        dist.init_process_group("gloo")
    model = run(**args)
    if not inside:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
