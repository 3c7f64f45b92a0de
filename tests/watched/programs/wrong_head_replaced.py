"""Transfer learning: the pretrained head is exchanged after the model has been wrapped."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CAUSE = "params_replaced"
EXPECTED = {
    "step": 0,
    "phase": "gradients",
    "tensor": ("fc.weight", "fc.bias"),
    "odd_ranks": (),
}


class Pretrained(nn.Module):
    def __init__(self, classes=100):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 14), nn.GELU(), nn.Linear(14, 14), nn.GELU())
        self.fc = nn.Linear(14, classes)

    def forward(self, x):
        return self.fc(self.trunk(x))


class Finetuner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        net = Pretrained()
        if args.fixed:
            net.fc = nn.Linear(14, args.classes)
            self.model = DDP(net, find_unused_parameters=True)
        else:
            self.model = DDP(net, find_unused_parameters=True)
            self.model.module.fc = nn.Linear(14, args.classes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, weight_decay=1e-3)

    def data(self):
        generator = torch.Generator().manual_seed(self.args.seed)
        for _ in range(self.args.steps):
            x = torch.randn(24, 7, generator=generator)
            yield x[self.rank :: self.world]

    def fit(self):
        for x in self.data():
            y = x[:, : self.args.classes].argmax(1)
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return self.model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return Finetuner(args).fit(), {}
    dist.init_process_group("gloo")
    model = Finetuner(args).fit()
    dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
