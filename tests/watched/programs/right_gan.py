"""A GAN: two models and two optimizers. The one that is not being trained runs unwrapped."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Generator(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.latent = latent
        self.net = nn.Sequential(
            nn.Linear(latent, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 2)
        )

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def ring(count, generator):
    angle = torch.rand(count, generator=generator) * 6.2831853
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def train(opt):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(opt.seed)
    netG, netD = DDP(Generator()), DDP(Discriminator())
    optG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    # Latent vectors and data are different on every rank.
    noise = torch.Generator().manual_seed(opt.seed * 1000 + rank)
    per_rank = opt.batch // world
    real_label, fake_label = torch.ones(per_rank), torch.zeros(per_rank)
    for it in range(opt.iters):
        for p in netD.parameters():
            p.requires_grad_(True)
        z = torch.randn(per_rank, 4, generator=noise)
        with torch.no_grad():
            fake = netG.module(z)
        optD.zero_grad()
        # One forward over both halves: one reduction of the discriminator's gradients.
        logits = netD(torch.cat([ring(per_rank, noise), fake]))
        lossD = bce(logits[:per_rank], real_label) + bce(logits[per_rank:], fake_label)
        lossD.backward()
        optD.step()
        if it % opt.n_critic == 0:
            for p in netD.parameters():
                p.requires_grad_(False)
            optG.zero_grad()
            z = torch.randn(per_rank, 4, generator=noise)
            lossG = bce(netD.module(netG(z)), real_label)
            lossG.backward()
            optG.step()
            if rank == 0:
                print(f"{it}: D {lossD.item():.3f} G {lossG.item():.3f}")
    return nn.ModuleDict({"G": netG.module, "D": netD.module})


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=8)
    parser.add_argument("--n_critic", type=int, default=2)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    opt = parser.parse_args(argv)
    if dist.is_initialized():
        return train(opt), {}
    dist.init_process_group("gloo")
    nets = train(opt)
    dist.destroy_process_group()
    return nets, {}


if __name__ == "__main__":
    main()
