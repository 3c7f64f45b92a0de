"""Digests on their way from a GPU, which the program does not have to wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Pending:
    """Digests that a GPU has not computed yet; whoever takes them waits for it."""

    def __init__(
        self, before: Sequence[int], parts: Sequence[tuple[Sequence[int], Coming | Arrived]]
    ) -> None:
        """Take what comes before them, and the digests of each device with their places."""
        self._before = before
        self._parts = parts

    def ready(self) -> bool:
        """Say whether nobody would have to wait."""
        return all(coming.ready() for _, coming in self._parts)

    def take(self) -> list[int]:
        """Return them."""
        found: dict[int, int] = {}
        for places, coming in self._parts:
            found |= zip(places, coming.take(), strict=True)
        return [*self._before, *(found[place] for place in range(len(found)))]


class Coming:
    """Numbers on their way from a device to the processor."""

    def __init__(self, numbers: torch.Tensor) -> None:
        """Send them off, behind all that the device still has to do."""
        # Only into memory that the system cannot move does a copy go on by itself.
        self._here = torch.empty(
            numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True
        ).copy_(numbers, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(numbers.device))

    def ready(self) -> bool:
        """Say whether they are here."""
        return bool(self._arrived.query())

    def take(self) -> list[int]:
        """Wait until they are here, and return them."""
        self._arrived.synchronize()
        numbers: list[int] = self._here.tolist()
        return numbers


class Arrived:
    """Numbers that the processor has computed, beside those that a device still has to."""

    def __init__(self, numbers: list[int]) -> None:
        """Hold them."""
        self._numbers = numbers

    def ready(self) -> bool:
        """Say that they are here."""
        return True

    def take(self) -> list[int]:
        """Return them."""
        return self._numbers
