"""Gradients are reduced as soon as they are ready, and they get ready in the order of the tasks."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn

CAUSE = "collective_order_differs"
# Sample 1 is the only one of the first four to be a "mask": rank 1 comes to that task first.
EXPECTED = {
    "step": 0,
    "phase": "gradients",
    "tensor": ("heads.mask.weight", "heads.mask.bias", "heads.edge.weight", "heads.edge.bias"),
    "odd_ranks": (1,),
}
TASKS = ["edge", "mask", "edge", "edge", "mask", "edge", "mask", "mask"] + ["edge", "mask"] * 2


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 9)
        self.heads = nn.ModuleDict({"edge": nn.Linear(9, 2), "mask": nn.Linear(9, 2)})

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.stem(x)))


class OverlappedReduction:
    """Starts the reduction of a gradient while backward is still at work on the others."""

    def __init__(self, model):
        self.started = []
        for name, parameter in model.named_parameters():
            # The stem is used by both tasks; it is complete when backward is.
            if name.startswith("heads"):
                parameter.register_post_accumulate_grad_hook(self.start)
        self.stem = list(model.stem.parameters())

    def start(self, parameter):
        self.started.append((dist.all_reduce(parameter.grad, async_op=True), parameter))

    def finish(self):
        for parameter in self.stem:
            self.start(parameter)
        for work, parameter in self.started:
            work.wait()
            parameter.grad /= dist.get_world_size()
        self.started.clear()


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Segmenter()
    reduction = OverlappedReduction(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mine = TASKS[rank::world]
    data = torch.randn(args.steps, 12, 5, generator=torch.Generator().manual_seed(args.seed))
    for x in data[:, rank::world]:
        tasks = sorted(set(mine)) if args.fixed else list(dict.fromkeys(mine))
        loss = 0.0
        for task in tasks:
            rows = torch.tensor([name == task for name in mine])
            target = x[rows, :2] if task == "edge" else x[rows, 2:4].abs()
            loss = loss + (model(x[rows], task) - target).square().sum() / len(x)
        optimizer.zero_grad()
        loss.backward()
        reduction.finish()
        optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return train(args), {}
    dist.init_process_group("gloo")
    model = train(args)
    dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
