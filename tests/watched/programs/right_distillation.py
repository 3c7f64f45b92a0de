"""A student learns from a frozen teacher; the teacher was wrapped once and now runs unwrapped."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def mlp(width):
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4))


def batches(seed, steps, rank, world):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(24, 6, generator=generator)
        yield x[rank::world], x[rank::world, :4].argmax(1)


def train_teacher(args, rank, world):
    teacher = DDP(mlp(32))
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(args.seed, args.teacher_steps, rank, world):
        optimizer.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        optimizer.step()
    # What batch norm has seen is a matter of each rank; the teacher has to be one.
    for buffer in teacher.module.buffers():
        dist.broadcast(buffer, src=0)
    return teacher


def train_student(args, teacher, rank, world):
    student = DDP(mlp(8))
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    frozen = teacher.module.eval().requires_grad_(False)
    for x, y in batches(args.seed + 1, args.student_steps, rank, world):
        with torch.no_grad():
            soft = F.softmax(frozen(x) / 2.0, dim=1)
        logits = student(x)
        distilled = F.kl_div(F.log_softmax(logits / 2.0, dim=1), soft, reduction="batchmean")
        optimizer.zero_grad()
        (F.cross_entropy(logits, y) + 4.0 * distilled).backward()
        optimizer.step()
    return student


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--teacher-steps", type=int, default=4)
    parser.add_argument("--student-steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    start = not dist.is_initialized()
    if start:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    teacher = train_teacher(args, rank, world)
    student = train_student(args, teacher, rank, world)
    if start:
        dist.destroy_process_group()
    return nn.ModuleDict({"teacher": teacher.module, "student": student.module}), {}


if __name__ == "__main__":
    main()
