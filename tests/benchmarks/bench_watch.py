"""What watching costs: step times as multiples of the bare step, and the digest against torch.dot.

python -m tests.benchmarks.bench_watch [SHARE] [CASE ...]

Bare and watched steps take turns in the same ranks, and a ratio is that of two neighbours, so that
what else the machine does cancels. Where it does much, CPU time says more: that of the whole
process, watched against bare, and that of the hooks alone. SHARE scales the number of pairs; the
default, 1, takes a quarter of an hour.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RANKS = 2
BATCH = 32
DOT = 0.7
"""Speed of the digest, at least, as a part of that of torch.dot."""
WARM = {"short": 70, "long": 9}
"""Watched steps before the first pair. Instruments look closer at the first 8 updates, and note
the place of each call in the first 64, which is nothing beside a step that is long."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how often it is measured."""

    widths: tuple[int, ...] | None
    """Of the layers of a perceptron; None for the residual network."""
    allowed: float
    pairs: int
    steps: int
    """Steps of each half of a pair."""


CASES = {
    "85 thousand": Case(widths=(64, 256, 256, 10), allowed=1.3, pairs=150, steps=10),
    "1.1 million": Case(widths=(256, 768, 768, 512, 10), allowed=1.15, pairs=100, steps=4),
    "25.2 million": Case(widths=(1024, 4096, 4096, 1024, 10), allowed=1.02, pairs=240, steps=1),
    "25.6 million, ResNet-50": Case(widths=None, allowed=1.02, pairs=120, steps=1),
}


def main() -> None:
    """Print the figures; end with 1 if one of them is not what it must be."""
    share = sys.argv[1] if len(sys.argv) > 1 else "1"
    cases = sys.argv[2:] or [*CASES, "digest"]
    if "RANK" in os.environ:
        _ranks(float(share), Path(os.environ["BENCH_OUT"]), cases)
        return
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", "-m", __spec__.name, share, *cases]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"BENCH_OUT": str(out)}
        subprocess.run(command, env=environment, check=True, timeout=3600)
        figures = json.loads(out.read_text())
    sys.exit(1 if _print(figures) else 0)


def _print(figures: dict[str, Any]) -> list[str]:
    """Print a table and return what is missed."""
    missed = []
    print(f"{RANKS} ranks, DDP, SGD with momentum, batch {BATCH}; medians, the bare step = 1")
    print(
        f"{'parameters':>24}  {'watched':>7}  {'95 % of it':>15}  {'allowed':>7}"
        f"  {'CPU time':>8}  {'in hooks':>8}  {'SHA-1':>6}  {'broadcast':>9}  bare"
    )
    for name, found in figures["steps"].items():
        watched, (low, high) = statistics.median(found["watched"]), _interval(found["watched"])
        middle = {key: statistics.median(values) for key, values in found.items()}
        allowed = CASES[name].allowed
        print(
            f"{name:>24}  {watched:>7.3f}  {f'{low:.3f} to {high:.3f}':>15}  {allowed:>7}"
            f"  {middle['processor']:>8.3f}  {middle['hooks']:>8.3f}"
            f"  {middle['sha1']:>6.2f}  {middle['broadcast']:>9.2f}  {middle['bare'] * 1e3:.2f} ms"
        )
        if watched > allowed:
            missed.append(f"{name}: {watched:.3f}, allowed {allowed}")
    if figures["digest"] is not None:
        speed = figures["digest"]
        print(f"digest of 64 MB from memory: {speed:.2f} of the speed of torch.dot, wanted {DOT}")
        if speed < DOT:
            missed.append(f"digest: {speed:.2f} of torch.dot, wanted {DOT}")
    for one in missed:
        print(f"missed: {one}")
    return missed


def _interval(values: list[float]) -> tuple[float, float]:
    """Return between which of the values their median is, with 95 % confidence."""
    ordered = sorted(values)
    # How many of n are below the median is binomial: n / 2, give or take half of sqrt(n).
    first = max(0, int((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
    return ordered[first], ordered[-1 - first]


def _ranks(share: float, out: Path, cases: list[str]) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    models = [name for name in cases if name != "digest"]
    steps = {name: _measure(CASES[name], share, out.parent / name) for name in models}
    if dist.get_rank() == 0:
        digest = _digest(share) if "digest" in cases else None
        out.write_text(json.dumps({"steps": steps, "digest": digest}))
    dist.barrier()
    dist.destroy_process_group()


def _measure(case: Case, share: float, folder: Path) -> dict[str, Any]:
    """Return the ratios of one model; all ranks are given the same folder, to meet there."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from harness.watch.watcher import Watcher

    class Timed(Watcher):
        """Adds up what the processor works in its hooks."""

        worked = 0.0

        def _guard(self, act: Callable[..., None]) -> Callable[..., None]:
            hook = super()._guard(act)

            def timed(*arguments: Any) -> None:
                start = time.thread_time()
                hook(*arguments)
                self.worked += time.thread_time() - start

            return timed

        def pause(self, paused: bool) -> None:
            # Hooks that return at once are what is left of it, a few microseconds a step.
            self.failed = "paused" if paused else None
            self.context.closed = paused

    torch.manual_seed(0)
    watcher = Timed(folder=str(folder))
    network, x = _network(case.widths)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def turn(name: str) -> dict[str, float]:
        """Return seconds, those of the processor, and those of the processor in hooks, a step."""
        watcher.pause(name != "watched")
        dist.barrier()
        start = time.perf_counter(), time.process_time(), watcher.worked
        for _ in range(case.steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if name in CHECKS:
                CHECKS[name](model)
        dist.barrier()
        watcher.pause(False)
        end = time.perf_counter(), time.process_time(), watcher.worked
        spent = [(b - a) / case.steps for a, b in zip(start, end, strict=True)]
        return dict(zip(("wall", "processor", "hooks"), spent, strict=True))

    pairs = max(4, int(case.pairs * share))
    for _ in range(-(-WARM["short"] // case.steps) if case.steps > 1 else WARM["long"]):
        turn("watched")
    found: dict[str, Any] = {"bare": [], "processor": [], "hooks": []}
    others = dict.fromkeys(CHECKS, max(3, min(25, pairs // 6)))
    for name, count in ({"watched": pairs} | others).items():
        found[name] = []
        for number in range(count):
            order = ("bare", name) if number % 2 else (name, "bare")
            spent = {which: turn(which) for which in order}
            bare = spent["bare"]
            found["bare"].append(bare["wall"])
            found[name].append(spent[name]["wall"] / bare["wall"])
            if name == "watched":
                found["processor"].append(spent[name]["processor"] / bare["processor"])
                found["hooks"].append(1 + spent[name]["hooks"] / bare["processor"])
    assert watcher.failed is None
    assert watcher.found is None
    # What was measured compares replicas: a weight that is made to differ is seen, in any part.
    with torch.no_grad():
        next(network.parameters()).add_(dist.get_rank())
    turn("watched")
    watcher.close()
    seen: list[bool | None] = [None] * RANKS
    dist.all_gather_object(seen, watcher.found is not None)
    assert any(seen), "the watcher that was measured did not see a weight that differs"
    return found


def _network(widths: tuple[int, ...] | None) -> tuple[torch.nn.Module, torch.Tensor]:
    import torch
    from torch import nn

    from tests.benchmarks.residual import residual_network

    if widths is None:
        return residual_network(), torch.randn(BATCH, 3, 32, 32)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.randn(BATCH, widths[0])


def _sha1(model: torch.nn.Module) -> None:
    import torch.distributed as dist

    total = hashlib.sha1()
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad):
            total.update(tensor.detach().numpy().data)
    digests: list[bytes | None] = [None] * RANKS
    dist.all_gather_object(digests, total.digest())
    assert len(set(digests)) == 1


def _broadcast(model: torch.nn.Module) -> None:
    import torch
    import torch.distributed as dist

    for parameter in model.parameters():
        for tensor in (parameter.detach(), parameter.grad):
            copy = tensor.clone()
            dist.broadcast(copy, 0)
            assert torch.equal(copy, tensor)


CHECKS: dict[str, Callable[[torch.nn.Module], None]] = {"sha1": _sha1, "broadcast": _broadcast}


def _digest(share: float) -> float:
    """Return the speed of the digest as a part of that of torch.dot, both reading from memory.

    Each reads other tensors than it read last: what was read a moment ago is in a cache, which is
    nothing that a step of training leaves there.
    """
    import torch

    from harness.watch.digests.digest import Digester

    tensors = [torch.randn(16_000_000) for _ in range(12)]
    digester = Digester()
    digester(tensors[:1])
    turns = itertools.cycle(tensors)

    def seconds(call: Callable[[torch.Tensor], object]) -> float:
        values = next(turns)
        start = time.perf_counter()
        call(values)
        return time.perf_counter() - start

    return statistics.median(
        seconds(lambda values: torch.dot(values, values))
        / seconds(lambda values: digester([values]))
        for _ in range(max(5, int(40 * share)))
    )


if __name__ == "__main__":
    main()
