"""What a rank has while a scenario runs: its place in the world, its streams, its randomness."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

from harness.fingerprint import fingerprint
from harness.record import Value, Writer

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Named once: writing the union out would build it anew for each of a step's hundred metrics.
_PLAIN = (float, int, str, type(None))


class Rank:
    """One rank of one arm; `run` receives it. The process group is up when `run` is called."""

    def __init__(
        self,
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        device: str,
        backend: str,
        seed: int,
        collective_timeout_s: float,
        writer: Writer,
    ) -> None:
        """Hold what the launcher found out; scenarios never build one."""
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.device = device
        """"cpu" or "cuda:<local_rank>": where this rank's tensors live."""
        self.backend = backend
        self.seed = seed
        self.collective_timeout_s = collective_timeout_s
        self.repeat = 0
        """0 = as written; 1, 2, ... = the A/A repeats, with the reduction order permuted."""
        self._writer = writer

    def log(self, *, step: int, phase: str = "", **metrics: Value | torch.Tensor) -> None:
        """Append one record: numbers, texts, or tensors of one element (taken as float64)."""
        self._writer.write(
            {name: _plain(value) for name, value in metrics.items()},
            repeat=self.repeat,
            step=step,
            phase=phase,
        )

    def digest(self, *, step: int, phase: str = "", **tensors: torch.Tensor) -> None:
        """Append the fingerprint of each tensor: `x.digest`, `.norm`, `.min`, `.max`, `.nonfinite`.

        Two ranks hold the same bits exactly if their `x.digest` are equal.
        """
        self._writer.write(_fingerprints(tensors), repeat=self.repeat, step=step, phase=phase)

    def snapshot(self, *, step: int, phase: str = "", **tensors: torch.Tensor) -> None:
        """Append the fingerprint and all values of each tensor, flattened, as float64.

        Exact for float16, bfloat16, float32 and float64. Distances are then taken by the judge.
        """
        import torch

        buffers = {
            name: tensor.detach().to("cpu", torch.float64).contiguous().reshape(-1).numpy().data
            for name, tensor in tensors.items()
        }
        self._writer.write(
            _fingerprints(tensors), repeat=self.repeat, step=step, phase=phase, tensors=buffers
        )

    def shard(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a global batch: rows rank, rank + world_size, ...

        One process gets the whole batch, which makes it the reference for free.
        """
        return batch[self.rank :: self.world_size]

    def permutation(self, count: int, *, name: str = "order", step: int = 0) -> torch.Tensor:
        """Return an order of `count` items for this repeat: int64, shape (count,).

        Repeat 0 gets 0, 1, 2, ...; later repeats each get an order of their own, the same on
        all ranks. Applying it to what a reduction runs over changes nothing but the rounding.
        """
        import torch

        if self.repeat == 0:
            return torch.arange(count)
        generator = self.generator(f"{name}/{self.repeat}/{step}")
        return torch.randperm(count, generator=generator)

    def generator(self, name: str) -> torch.Generator:
        """Return a CPU generator that depends on the run's seed and `name`, and on nothing else.

        The same on every rank: put the rank into the name where ranks should differ.
        """
        import torch

        raw = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(raw, "little") >> 1)


def _plain(value: Value | torch.Tensor) -> Value:
    if isinstance(value, _PLAIN):
        return value
    return value.detach().item()


def _fingerprints(tensors: dict[str, torch.Tensor]) -> dict[str, Value]:
    metrics: dict[str, Value] = {}
    for name, tensor in tensors.items():
        print_ = fingerprint(tensor)
        metrics[f"{name}.digest"] = print_.digest
        metrics[f"{name}.norm"] = print_.norm
        metrics[f"{name}.min"] = print_.smallest
        metrics[f"{name}.max"] = print_.largest
        metrics[f"{name}.nonfinite"] = print_.nonfinite
    return metrics
