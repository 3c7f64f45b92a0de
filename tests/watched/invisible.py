"""Trains each case bare and watched, in real ranks, and says whether every bit is the same.

python -m torch.distributed.run --nproc-per-node=2 -m tests.watched.invisible OUT
"""

import contextlib
import hashlib
import json
import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from harness.watch.closing import close
from harness.watch.watcher import Watcher

STEPS = 4


class Net(nn.Module):
    def __init__(self, tied=False, checkpointed=False):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 11, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids).mean(1)
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return self.head(x)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches():
    for _ in range(STEPS):
        ids = torch.randint(0, 11, (6, 5))
        yield ids, ids[:, 0]


def plain(make=sgd, *, wrap=DDP, autocast=False, scaled=False, window=1, net=None, **options):
    model = wrap(Net(**(net or {})), **options)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=scaled)
    losses = []
    for step, (ids, target) in enumerate(batches()):
        last = step % window == window - 1
        hold = contextlib.nullcontext() if last else model.no_sync()
        with hold, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(ids), target)
        scaler.scale(loss).backward()
        if last:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def two_models():
    left, right = DDP(Net()), DDP(nn.Linear(11, 1))
    first, second = sgd(left), torch.optim.Adam(right.parameters())
    losses = []
    for ids, _ in batches():
        second.zero_grad()
        right(left(ids).detach()).square().mean().backward()
        second.step()
        first.zero_grad()
        loss = right(left(ids)).mean()
        loss.backward()
        first.step()
        losses.append(loss.item())
    return losses, [left, right], [first, second]


def sharded(net):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(net, mesh=mesh)


def divided_state(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)


def averaged():
    """Evaluations through the wrapper, and through an average of the weights."""
    model = DDP(Net())
    optimizer = sgd(model)
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    losses = []
    for ids, target in batches():
        optimizer.zero_grad()
        F.cross_entropy(model.train()(ids), target).backward()
        optimizer.step()
        ema.update_parameters(model)
        with torch.no_grad():
            losses.append(F.cross_entropy(model.eval()(ids), target).item())
            losses.append(F.cross_entropy(ema.eval()(ids), target).item())
    return losses, [model, ema], [optimizer]


def adam(model):
    return torch.optim.Adam(model.parameters(), foreach=True)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), fused=True)


CASES = {
    "sgd_momentum": plain,
    "adam_foreach": lambda: plain(adam),
    "adamw_fused": lambda: plain(adamw),
    "bf16_autocast": lambda: plain(autocast=True),
    "grad_scaler": lambda: plain(scaled=True),
    "static_graph": lambda: plain(static_graph=True),
    "bucket_view": lambda: plain(gradient_as_bucket_view=True),
    "fully_shard": lambda: plain(adam, wrap=sharded),
    "zero_redundancy": lambda: plain(divided_state),
    "averaged_weights": averaged,
    "no_sync": lambda: plain(window=2),
    "checkpointing": lambda: plain(net={"checkpointed": True}),
    "two_models": two_models,
    "tied_weights": lambda: plain(net={"tied": True}),
    # These two must come out different: they show that the comparison can see it.
    "draws_a_number": plain,
    "writes_a_bit": plain,
}


def state(result):
    """Everything that a run leaves behind, each as a hash of its bytes."""
    losses, models, optimizers = result
    kept = {"losses": losses, "python": random.getstate(), "torch": torch.get_rng_state()}
    for number, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            kept[f"model {number} {name}"] = tensor
            kept[f"grad {number} {name}"] = tensor.grad
    for number, optimizer in enumerate(optimizers):
        settings = [{**group, "params": None} for group in optimizer.param_groups]
        kept[f"groups {number}"] = settings
        states = [values for values in optimizer.state.values() if values]
        for index, values in enumerate(states):
            kept.update({f"state {number} {index} {key}": value for key, value in values.items()})
    return {name: hashed(value) for name, value in kept.items()}


def hashed(value):
    value = getattr(value, "_local_tensor", value)
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        value = (value.dtype, value.shape, bytes(raw.tolist()))
    return hashlib.sha256(repr(value).encode()).hexdigest()


def run(name, out, watched):
    torch.manual_seed(7 + dist.get_rank())
    random.seed(7 + dist.get_rank())
    if not watched:
        return state(CASES[name]()), None
    watcher = Watcher(folder=str(out / name))
    if name == "draws_a_number":
        watcher.note = lambda text: None
        watcher.meet = lambda meet=watcher.meet: (torch.rand(1), meet())
    handle = None
    if name == "writes_a_bit":

        def write(optimizer, args, kwargs):
            first = optimizer.param_groups[0]["params"][0]
            first.detach().view(torch.int32)[0, 0] ^= 1

        handle = register_optimizer_step_post_hook(write)
    after = state(CASES[name]())
    if handle:
        handle.remove()
    close(watcher, script_code=0, quiet=True)
    summary = watcher.summary()
    return after, {"failed": watcher.failed, "optimizers": summary, "found": bool(watcher.found)}


def main():
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {}
    for name in CASES:
        bare, _ = run(name, out, watched=False)
        again, _ = run(name, out, watched=False)
        after, saw = run(name, out, watched=True)
        results[name] = saw | {
            "things": len(bare),
            "repeatable": bare == again,
            "different": [key for key in bare if bare[key] != after.get(key)],
            "same_names": bare.keys() == after.keys(),
        }
        dist.barrier()
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
