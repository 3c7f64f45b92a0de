"""Stop and go on: model, optimizer, schedule and the random numbers of every rank are restored."""

import argparse
import random
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def build(args):
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=args.steps)
    return net, optimizer, schedule


def save(folder, step, net, optimizer, schedule):
    rank = dist.get_rank()
    torch.save({"torch": torch.get_rng_state(), "python": random.getstate()}, folder / f"{rank}.pt")
    if rank == 0:
        state = {"model": net, "optimizer": optimizer, "schedule": schedule}
        content = {name: thing.state_dict() for name, thing in state.items()}
        torch.save(content | {"step": step}, folder / "latest.pt")
    dist.barrier()


def load(folder, net, optimizer, schedule):
    content = torch.load(folder / "latest.pt", weights_only=True)
    net.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    schedule.load_state_dict(content["schedule"])
    own = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
    torch.set_rng_state(own["torch"])
    random.setstate(own["python"])
    return content["step"]


def train(args, folder, until):
    rank, world = dist.get_rank(), dist.get_world_size()
    net, optimizer, schedule = build(args)
    model = DDP(net)
    torch.manual_seed(args.seed + 1 + rank)
    random.seed(args.seed + 1 + rank)
    start = 0
    if (folder / "latest.pt").exists():
        start = load(folder, net, optimizer, schedule)
    generator = torch.Generator().manual_seed(args.seed)
    data = torch.randn(args.steps, 12, 6, generator=generator)
    for step in range(start, until):
        x = data[step, rank::world]
        jitter = random.uniform(0.9, 1.1)
        loss = (model(x * jitter).squeeze(1) - x.norm(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    save(folder, until, net, optimizer, schedule)
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stop-after", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    train(args, Path(name[0]), args.stop_after)
    model = train(args, Path(name[0]), args.steps)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(name[0])
    if own:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
