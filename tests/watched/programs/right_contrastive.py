"""Contrastive learning: embeddings of all ranks are gathered, with gradients, as negatives."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class GatherLayer(torch.autograd.Function):
    """All-gather with a gradient: every rank gets back what all ranks have for its part."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 8))
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image, text):
        image, text = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return image, text, self.logit_scale.exp()


def clip_loss(image, text, scale):
    # The whole matrix on every rank: DDP's mean over ranks is then the gradient of one process,
    # as the backward of the gather sums what all ranks send back.
    images, texts = GatherLayer.apply(image), GatherLayer.apply(text)
    logits = scale * images @ texts.t()
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    single = not dist.is_initialized()
    if single:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        concept = torch.randn(12, 5, generator=generator)
        pixels = torch.cat([concept.sin(), concept.cos(), concept[:, :2]], dim=1)
        mine = slice(rank, None, world)
        loss = clip_loss(*model(pixels[mine], concept[mine]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.module.logit_scale.clamp_(0, 4.6052)
    if single:
        dist.destroy_process_group()
    return model, {"loss": loss.item()}


if __name__ == "__main__":
    main()
