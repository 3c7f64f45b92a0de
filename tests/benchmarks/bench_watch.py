"""What watching costs: step times as multiples of the bare step, and the digest against torch.dot.

python -m tests.benchmarks.bench_watch [ROUNDS]
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RANKS = 2
BATCH = 32
MODELS = {"85 thousand": (64, 256, 256, 10), "1.1 million": (256, 768, 768, 512, 10)}
MODELS["25 million"] = (1024, 4096, 4096, 1024, 10)
ALLOWED = {"85 thousand": 1.3, "1.1 million": 1.15, "25 million": 1.02}
DOT = 0.7


def main() -> None:
    """Print the figures."""
    if "RANK" in os.environ:
        _ranks(int(sys.argv[1]), Path(sys.argv[2]))
        return
    rounds = sys.argv[1] if len(sys.argv) > 1 else "7"
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", "-m", __spec__.name, rounds, str(out)]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        subprocess.run(command, env=environment, check=True, timeout=600)
        figures = json.loads(out.read_text())
    print(f"{RANKS} ranks, DDP, SGD with momentum, batch {BATCH}; the bare step = 1")
    print(
        f"{'parameters':>14}  {'watched':>8}  {'allowed':>8}  {'SHA-1':>8}  {'broadcast':>9}  bare"
    )
    for size, times in figures["steps"].items():
        bare = times["bare"]
        ratios = [times[kind] / bare for kind in ("watched", "sha1", "broadcast")]
        watched, sha1, broadcast = (f"{ratio:.3f}" for ratio in ratios)
        print(
            f"{size:>14}  {watched:>8}  {ALLOWED[size]:>8}  {sha1:>8}  {broadcast:>9}"
            f"  {bare * 1e3:.2f} ms"
        )
    speed = figures["digest"]
    print(f"digest of 64 MB: {speed:.2f} of the speed of torch.dot (allowed: {DOT})")


def _ranks(rounds: int, out: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    steps: dict[str, dict[str, float]] = {}
    for size, widths in MODELS.items():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        model = DistributedDataParallel(nn.Sequential(*layers[:-1]))
        x = torch.randn(BATCH, widths[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        count = 3 if size == "25 million" else 40
        times: dict[str, list[float]] = {name: [] for name in ("bare", "watched", *CHECKS)}
        for turn in range(rounds):
            for name, measured in times.items():
                with _checking(name, model, optimizer, str(out) + f".{len(steps)}.{turn}"):
                    _step(model, optimizer, x)
                    _step(model, optimizer, x)
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(count):
                        _step(model, optimizer, x)
                    measured.append((time.perf_counter() - start) / count)
        steps[size] = {name: min(measured) for name, measured in times.items()}
    dist.barrier()
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"steps": steps, "digest": _digest(rounds)}))
    dist.barrier()
    dist.destroy_process_group()


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


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


@contextlib.contextmanager
def _checking(
    name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str
) -> Iterator[None]:
    if name == "watched":
        from harness.watch.watcher import Watcher

        watcher = Watcher(folder=folder)
        watcher.modules.add(model)
        yield
        watcher.close()
        assert watcher.failed is None
        assert watcher.found is None
    elif name in CHECKS:
        handle = optimizer.register_step_post_hook(lambda *_: CHECKS[name](model))
        yield
        handle.remove()
    else:
        yield


def _digest(rounds: int) -> float:
    import torch

    from harness.watch.digest import Digester

    values = torch.randn(16_000_000)
    digester = Digester()
    calls = {"dot": lambda: torch.dot(values, values), "digest": lambda: digester([values])}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(4 * rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best["dot"] / best["digest"]


if __name__ == "__main__":
    main()
