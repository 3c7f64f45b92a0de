"""One dict of settings and build_* functions; static graph, gradients as views of the buckets."""

import copy
import sys

import torch
import torch.distributed as dist

CONFIG = {
    "seed": 0,
    "model": {"width": 16, "depth": 3, "act": "SiLU"},
    "optim": {"name": "AdamW", "lr": 3e-3, "weight_decay": 0.05, "betas": (0.9, 0.95)},
    "schedule": {"warmup": 3, "total": 10},
    "ddp": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    "data": {"samples": 120, "global_batch": 12},
}


def build_model(cfg):
    layers = [torch.nn.Linear(5, cfg["width"])]
    for _ in range(cfg["depth"]):
        layers += [getattr(torch.nn, cfg["act"])(), torch.nn.Linear(cfg["width"], cfg["width"])]
    return torch.nn.Sequential(*layers, torch.nn.Linear(cfg["width"], 2))


def build_optimizer(model, cfg):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": cfg["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    return getattr(torch.optim, cfg["name"])(groups, lr=cfg["lr"], betas=cfg["betas"])


def build_schedule(optimizer, cfg):
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, cfg["warmup"])
    rest = cfg["total"] - cfg["warmup"]
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rest)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [cfg["warmup"]])


def run(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg["seed"])
    model = torch.nn.parallel.DistributedDataParallel(build_model(cfg["model"]), **cfg["ddp"])
    optimizer = build_optimizer(model, cfg["optim"])
    schedule = build_schedule(optimizer, cfg["schedule"])
    generator = torch.Generator().manual_seed(cfg["seed"])
    x = torch.randn(cfg["data"]["samples"], 5, generator=generator)
    y = torch.stack([x.sum(1), x.prod(1)], dim=1)
    order = torch.randperm(len(x), generator=generator)
    for batch in order.split(cfg["data"]["global_batch"])[: cfg["schedule"]["total"]]:
        mine = batch[rank::world]
        loss = torch.nn.functional.mse_loss(model(x[mine]), y[mine])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def main(argv=None):
    cfg = copy.deepcopy(CONFIG)
    words = sys.argv[1:] if argv is None else argv
    for key, value in zip(words[::2], words[1::2], strict=True):
        cfg[key.removeprefix("--")] = int(value)
    if dist.is_initialized():
        return run(cfg), {}
    dist.init_process_group("gloo")
    model = run(cfg)
    dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
