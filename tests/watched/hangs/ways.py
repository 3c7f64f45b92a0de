"""Ways in which ranks part: a loop each, as a user would write it. `--fixed` is the right way."""

import argparse
import os
import signal
import sys
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

TIMEOUT_S = 60.0


class Rows(Dataset):
    """Of one rank: no other has them."""

    def __init__(self, count):
        self.count = count
        self.rank = dist.get_rank()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([float(index), 1.0, 2.0, self.rank])


def network(norm=False, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 1)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(4))
    model = DDP(nn.Sequential(*layers), **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def update(model, optimizer, rows):
    optimizer.zero_grad()
    model(rows).mean().backward()
    optimizer.step()


def stop_decision_local(args):
    model, optimizer = network()
    best = 1.0
    for epoch in range(6):
        update(model, optimizer, torch.ones(2, 4))
        score = torch.tensor(1.0 if dist.get_rank() != args.odd or epoch < 2 else 0.0)
        if args.fixed:
            dist.all_reduce(score, op=dist.ReduceOp.MIN)
        if score < best:  # stops
            break


def uneven_inputs(args):
    model, optimizer = network()
    uneven = dist.get_rank() == args.odd and not args.fixed
    loader = DataLoader(Rows(6 if uneven else 8), batch_size=2)
    for _ in range(1):
        for rows in loader:  # ends
            update(model, optimizer, rows)


def rank0_only_collective(args):
    model, optimizer = network(norm=True)
    for step in range(4):
        update(model, optimizer, torch.randn(3, 4))
        if step == 1 and dist.get_rank() == 0:
            tested = model.module if args.fixed else model
            tested.train()
            with torch.no_grad():
                tested(torch.randn(3, 4))  # only rank 0
            tested.train()


def rank0_saves(args):
    model, optimizer = network()
    for step in range(3):
        update(model, optimizer, torch.ones(2, 4))
        if step == 1 and (args.fixed or dist.get_rank() == 0):
            dist.barrier()  # only rank 0


def step_skipped_on_one_rank(args):
    model, optimizer = network()
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).mean()
        bad = step == 2 and (dist.get_rank() == args.odd or args.fixed)
        if bad:
            continue
        loss.backward()
        optimizer.step()


def collective_order_differs(args):
    both = {"loss": torch.ones(3), "accuracy": torch.ones(3)}
    reduce = {"loss": reduce_loss, "accuracy": reduce_accuracy}
    names = sorted(both) if args.fixed or dist.get_rank() != args.odd else sorted(both)[::-1]
    dist.barrier()
    for name in names:
        reduce[name](both[name])


def reduce_loss(value):
    dist.all_reduce(value)


def reduce_accuracy(value):
    dist.all_reduce(value)


def collective_mismatch(args):
    value = torch.ones(4, dtype=torch.float32)
    if dist.get_rank() == args.odd and not args.fixed:
        value = value.int()
    dist.all_reduce(value)


def operation_mismatch(args):
    value = torch.ones(4)
    dist.all_reduce(value)
    if dist.get_rank() == args.odd and not args.fixed:
        dist.broadcast(value, src=0)
    else:
        dist.all_reduce(value)


def buffer_written_before_backward(args):
    model, optimizer = network(norm=True)
    for _ in range(3):
        scores = []
        for number in range(2):
            if number == 0 or not args.fixed:
                average(model.buffers())
            scores.append(model(torch.randn(4, 4)).mean())
        (scores[0] - scores[1]).backward()  # raises
        optimizer.step()


@torch.no_grad()
def average(buffers):
    for buffer in buffers:
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


def static_graph_no_sync(args):
    model, optimizer = network(static_graph=True)
    for step in range(3):
        alone = nullcontext() if args.fixed and step == 0 else model.no_sync()
        with alone:
            model(torch.ones(2, 4)).mean().backward()  # raises
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()


class Checkpointed(nn.Module):
    def __init__(self, args):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.args = nn.Linear(4, 4), nn.Linear(4, 1), args

    def forward(self, x):
        hidden = checkpoint(self.layer, x.requires_grad_(), use_reentrant=not self.args.fixed)
        return self.head(hidden)


def ready_twice(args):
    model = DDP(Checkpointed(args), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        update(model, optimizer, torch.ones(2, 4) * (1 + dist.get_rank()))  # raises


def shape_mismatch(args):
    odd = dist.get_rank() == args.odd and not args.fixed
    value = torch.ones(2 if odd else 4096)
    dist.barrier()
    dist.all_reduce(value)


def killed(args):
    model, optimizer = network()
    for step in range(4):
        if step == 2 and dist.get_rank() == args.odd and not args.fixed:
            os.kill(os.getpid(), signal.SIGKILL)
        update(model, optimizer, torch.ones(2, 4))


def raises(args):
    model, optimizer = network()
    for step in range(4):
        if step == 2 and dist.get_rank() == args.odd and not args.fixed:
            raise KeyError("labels")
        update(model, optimizer, torch.ones(2, 4))


def exits_by_itself(args):
    model, optimizer = network()
    update(model, optimizer, torch.ones(2, 4))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("way")
    parser.add_argument("--odd", type=int, default=1)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    globals()[args.way](args)
    dist.destroy_process_group()
