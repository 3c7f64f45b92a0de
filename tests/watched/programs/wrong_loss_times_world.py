"""The loss is multiplied by the number of ranks, though DDP averages anyway."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "loss_scaled_by_world"
EXPECTED = {"step": 0, "phase": "gradients", "tensor": None, "odd_ranks": None}


class DetectionLoss(nn.Module):
    """Box and class terms, with the weights of the paper."""

    def __init__(self, box_weight=5.0, class_weight=1.0):
        super().__init__()
        self.box_weight, self.class_weight = box_weight, class_weight

    def forward(self, output, boxes, labels):
        box = nn.functional.smooth_l1_loss(output[:, :4], boxes)
        classes = nn.functional.cross_entropy(output[:, 4:], labels)
        return self.box_weight * box + self.class_weight * classes


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    begin = not dist.is_initialized()
    if begin:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 7)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = DetectionLoss()
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        x = torch.randn(24, 10, generator=generator)[rank::world_size]
        loss = criterion(model(x), x[:, :4].tanh(), x[:, 4:7].argmax(1))
        if not args.fixed:
            loss = loss * world_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if begin:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
