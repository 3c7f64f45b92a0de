"""A loop of one's own with Accelerate, accumulation and clipping included; a fault breaks it."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FAULTS = ("none", "edit", "data", "bypass")
STEPS = 6
BAD_STEP = 3


def loop(out: Path, fault="none", *, log_with=()):
    """Train for two epochs; return the model."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, log_with=list(log_with), project_dir=out
    )
    accelerator.init_trackers("accelerated")
    set_seed(5)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(72, 8, generator=generator), torch.randint(0, 2, (72,), generator=generator)
    inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=4, shuffle=True)
    validation = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=4)
    model, optimizer, scheduler, validation = accelerator.prepare(
        inner, optimizer, scheduler, validation
    )
    if fault != "data":
        loader = accelerator.prepare(loader)
    updates = 0
    for _ in range(2):
        model.train()
        for inputs, target in loader:
            with accelerator.accumulate(model):
                past = fault == "bypass" and updates >= BAD_STEP
                loss = F.cross_entropy((inner if past else model)(inputs), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.log({"loss": loss.item()}, step=updates)
                if fault == "edit" and updates == BAD_STEP and not accelerator.is_main_process:
                    with torch.no_grad():
                        inner[2].weight[1, 2] += 1e-3
                updates += 1
        model.eval()
        with torch.no_grad():
            for inputs, target in validation:
                accelerator.gather_for_metrics((model(inputs).argmax(1), target))
    # `end_training` would end the process group as well, which other cases go on with.
    for tracker in accelerator.trackers:
        tracker.finish()
    return inner
