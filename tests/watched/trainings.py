"""Trainings of many kinds, each a few steps of a small network: what a watcher must not change.

Each returns its losses, its models and its optimizers.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STEPS = 4
MASKS = []
"""What each dropout has kept, in order; a checkpointed one drops twice."""


class Dropout(nn.Dropout):
    def forward(self, x):
        y = super().forward(x)
        if not torch.compiler.is_compiling():
            MASKS.append((y != 0).tolist())
        return y


class Net(nn.Module):
    def __init__(self, tied=False, checkpointed=None, spectral=False):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), Dropout(0.3))
        self.head = nn.Linear(16, 11, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight
        if spectral:
            # Whoever reads its weight makes a step of the iteration.
            nn.utils.parametrizations.spectral_norm(self.head)

    def forward(self, ids):
        x = self.embed(ids).mean(1)
        if self.checkpointed is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.checkpointed == "reentrant")
        return self.head(x)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(**options):
    return lambda model: torch.optim.Adam(model.parameters(), **options)


def adamw(**options):
    return lambda model: torch.optim.AdamW(model.parameters(), **options)


def divided_state(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)


def batches(steps=STEPS):
    for _ in range(steps):
        ids = torch.randint(0, 11, (6, 5))
        yield ids, ids[:, 0]


def plain(
    make=sgd, *, wrap=DDP, autocast=False, scaled=False, window=1, net=None, backend=None, **options
):
    model = wrap(Net(**(net or {})), **options)
    optimizer = make(model)
    called = model
    if backend is not None:
        torch._dynamo.reset()
        called = torch.compile(model, backend=backend)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=scaled)
    losses = []
    for step, (ids, target) in enumerate(batches()):
        last = step % window == window - 1
        hold = contextlib.nullcontext() if last else model.no_sync()
        with hold, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(called(ids), target)
        scaler.scale(loss).backward()
        if last:
            if scaled:
                scaler.unscale_(optimizer)
            clip(model)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def clip(model):
    if hasattr(model, "clip_grad_norm_"):
        # FullyShardedDataParallel's own knows of the other parts.
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def adversaries():
    """A generator that learns through a discriminator, and the discriminator."""
    generator, discriminator = DDP(Net()), DDP(nn.Linear(11, 1))
    first, second = sgd(generator), torch.optim.Adam(discriminator.parameters())
    losses = []
    for ids, _ in batches():
        second.zero_grad()
        real = discriminator(torch.randn(6, 11)).mean()
        fake = discriminator(generator(ids).detach()).mean()
        (fake - real).backward()
        second.step()
        first.zero_grad()
        loss = -discriminator(generator(ids)).mean()
        loss.backward()
        first.step()
        losses.append(loss.item())
    return losses, [generator, discriminator], [first, second]


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


def uneven():
    """One rank has a batch less than the other."""
    model = DDP(Net())
    optimizer = sgd(model)
    losses = []
    with Join([model]):
        for ids, target in batches(STEPS - dist.get_rank()):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, [model], [optimizer]


def with_closure():
    model = DDP(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    losses = []
    for ids, target in batches():

        def closure(ids=ids, target=target):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), target)
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    return losses, [model], [optimizer]


class Noisy(Dataset):
    """Samples that each worker disturbs at random."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randint(0, 11, (5,)), torch.tensor(index % 11), index


def from_workers():
    """Two loaders with workers: one shuffles by itself, the other has a sampler."""
    data, model = Noisy(), DDP(Net())
    optimizer = sgd(model)
    sampler = DistributedSampler(data)
    shuffled = DataLoader(data, 6, shuffle=True, num_workers=2)
    divided = DataLoader(data, 6, sampler=sampler, num_workers=1, persistent_workers=True)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for loader in (shuffled, divided) if epoch else (divided,):
            for ids, target, indices in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(ids), target)
                loss.backward()
                optimizer.step()
                seen.append((loss.item(), indices.tolist(), ids.tolist()))
    return seen, [model], [optimizer]


def fully_sharded(net):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(net, device_id=torch.device("cpu"))


def fully_shard(net):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


CASES = {
    "sgd_momentum": plain,
    "adam_foreach": lambda: plain(adam(foreach=True)),
    "adam_fused": lambda: plain(adam(fused=True)),
    "adamw_foreach": lambda: plain(adamw(foreach=True)),
    "adamw_fused": lambda: plain(adamw(fused=True)),
    "bf16_autocast": lambda: plain(autocast=True),
    "grad_scaler": lambda: plain(scaled=True),
    "static_graph": lambda: plain(static_graph=True),
    "bucket_view": lambda: plain(gradient_as_bucket_view=True),
    "static_graph_bucket_view": lambda: plain(static_graph=True, gradient_as_bucket_view=True),
    "fsdp1": lambda: plain(adam(), wrap=fully_sharded),
    "fully_shard": lambda: plain(adam(), wrap=fully_shard),
    "zero_redundancy": lambda: plain(divided_state),
    "no_sync": lambda: plain(window=2),
    "join": uneven,
    "checkpointing": lambda: plain(net={"checkpointed": "not reentrant"}),
    "checkpointing_reentrant": lambda: plain(net={"checkpointed": "reentrant"}),
    "two_models": adversaries,
    "averaged_weights": averaged,
    "tied_weights": lambda: plain(net={"tied": True}),
    "spectral_norm": lambda: plain(net={"spectral": True}),
    "loader_workers": from_workers,
    "closure": with_closure,
    "compiled_eager": lambda: plain(backend="eager"),
    "compiled_aot_eager": lambda: plain(backend="aot_eager"),
}
