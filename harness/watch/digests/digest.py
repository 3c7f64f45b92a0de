"""Digest of many tensors in one pass over their memory: keyed, position-dependent, exact.

In the memory of the processor it is a hash (`hashing`), if the package for that is installed. What
follows is the digest that needs nothing but torch, and that a GPU computes.

The bytes of a tensor are rows of 2048, and each row is multiplied with a matrix of random weights
(`product`): eight sums, exact integers, so no bit is lost to rounding. These sums are bytes again,
64 times fewer, and rows again: they are multiplied once more. What is left is weighted with random
64-bit numbers and added up modulo 2^64.

Every bit counts, and every place. In the first product no change of one or two bytes in a row
cancels, with certainty: no flipped bit, no two flipped signs, no two swapped bytes. Of any other
change it is a matter of chance, and of the weights alone: a given change is missed by at most one
in 2^56 choices of the weights in each of the products, and one in 2^38 in the last sum. What it
can miss, then, is what somebody computed in order to be missed. A sum of 64-bit words with odd
weights would be simpler, and is blind: two flipped sign bits at the top of two words add up to
zero.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.watch.digests import hashing
from harness.watch.digests.hashing import Hasher
from harness.watch.digests.pending import Arrived, Coming, Pending
from harness.watch.digests.plan import Plan
from harness.watch.digests.sample import is_sampled, part_of, sample

_PLANS = 16
"""Sets of tensors remembered at the same time; a network with unused parameters has several."""
STAGED = 1 << 21
"""Bytes of gradients, or samples of them, up to which they are copied to wait for parameters."""
_CPU = torch.device("cpu")
_DEFERRED = ("cuda",)
"""Devices that compute digests themselves, behind the back of the program. Others are copied."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


_Form = tuple[object, ...]
_Key = tuple[bool, list[_Form | None], list[_Form | None]]


@dataclass(frozen=True)
class _Waiting:
    """How tensors of such forms are staged."""

    key: _Key
    plan: Plan | None
    """None if they are not."""
    first_as_is: bool
    """Whether there is nothing to convert, nor to leave out, before they are copied."""
    then_as_is: bool


def method_of(tensor: torch.Tensor) -> str:
    """Return how the digest of a tensor is made; only those that are made alike can be compared."""
    return "" if hashing.xxh3 is None or tensor.device.type in _DEFERRED else "xxh3"


class Digester:
    """Digests lists of tensors; keeps buffers for the lists it has seen."""

    def __init__(self) -> None:
        """Start with no buffers."""
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._hasher = Hasher()
        self._waiting: _Waiting | None = None
        """What was staged last."""

    def __call__(
        self, tensors: Sequence[torch.Tensor | None], *, sampled: bool = False
    ) -> list[int]:
        """Return a signed 64-bit digest of each tensor; the tensors are only read.

        Equal for equal dtype, shape and bits, and in practice only then. None has a digest of its
        own. Sparse and quantised tensors are copied first.

        Args:
            tensors: what to read.
            sampled: read no more than a sample of the large ones.

        Raises:
            RuntimeError: the memory of a tensor was taken away.
        """
        digests = self.later(tensors, sampled=sampled)
        return digests.take() if isinstance(digests, Pending) else digests

    def later(
        self,
        tensors: Sequence[torch.Tensor | None],
        *,
        sampled: bool = False,
        part: int | None = None,
        before: Sequence[int] = (),
    ) -> list[int] | Pending:
        """Return the digests after `before`, without waiting for a GPU that has them to compute.

        Args:
            tensors: what to read.
            sampled: read no more than a sample of the large ones.
            part: read no more than this part of the large ones.
            before: digests to put in front.

        Raises:
            RuntimeError: the memory of a tensor was taken away; or the GPU is recording a graph,
                which digests must not become a part of.
        """
        if not tensors:
            return list(before)
        with torch.no_grad(), _no_modes():
            dense = _read(tensors, sampled=sampled, part=part)
            if "cpu" not in _DEFERRED and all([t is None or t.is_cpu for t in dense]):
                return [*before, *self._numbers(dense)]
            devices = list(dict.fromkeys([t.device for t in dense if t is not None])) or [_CPU]
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("the update is recorded as a CUDA graph")
            parts = []
            for device in devices:
                here = (None, device) if device == devices[0] else (device,)
                places = [i for i, t in enumerate(dense) if (t if t is None else t.device) in here]
                there = [dense[place] for place in places]
                parts.append((places, self._coming(there, device)))
            return Pending(before, parts)

    def _numbers(self, dense: Sequence[torch.Tensor | None]) -> list[int]:
        """Return the digests of what is in the memory of the processor."""
        if hashing.xxh3 is not None:
            return self._hasher(dense)
        return self._plan(dense, _CPU).numbers(dense)

    def _coming(
        self, dense: Sequence[torch.Tensor | None], device: torch.device
    ) -> Coming | Arrived:
        if device.type not in _DEFERRED:
            return Arrived(self._numbers(dense))
        return Coming(self._plan(dense, device).digests(dense))

    def stage(
        self,
        first: Sequence[torch.Tensor | None],
        then: Sequence[torch.Tensor | None],
        part: int | None,
    ) -> Staged | None:
        """Copy samples of what is read now, to be digested together with what is read later.

        None where that would be much, is not in the memory of the processor, or has nothing for it:
        hashing twice takes no longer than hashing once.

        Args:
            first: what may be another thing later.
            then: what will be given to `Staged.finish`.
            part: as in `later`, of the second ones.
        """
        if hashing.xxh3 is not None:
            return None
        with torch.no_grad(), _no_modes():
            key = (part is None, _forms(first), _forms(then))
            if self._waiting is None or self._waiting.key != key:
                self._waiting = self._wait_for(key, first, then, part)
            waiting = self._waiting
            if waiting.plan is None:
                return None
            waiting.plan.stage(first if waiting.first_as_is else _read(first, sampled=True))
            return Staged(waiting.plan, len(first), part, as_is=waiting.then_as_is)

    def _wait_for(
        self,
        key: _Key,
        first: Sequence[torch.Tensor | None],
        then: Sequence[torch.Tensor | None],
        part: int | None,
    ) -> _Waiting:
        held, later = _read(first, sampled=True), _read(then, part=part)
        size = 0
        for tensor in held:
            size += 0 if tensor is None else tensor.nbytes if tensor.is_cpu else STAGED + 1
        if size > STAGED or not all(t is None or t.is_cpu for t in then):
            return _Waiting(key, None, first_as_is=False, then_as_is=False)
        # Of the second ones only the sizes count, and all parts of a tensor have the same.
        plan = self._plan([*held, *later], _CPU, staged=len(first))
        return _Waiting(
            key,
            plan,
            first_as_is=all(map(operator.is_, first, held)),
            then_as_is=all(map(operator.is_, then, later)),
        )

    def _plan(
        self, dense: Sequence[torch.Tensor | None], device: torch.device, staged: int = 0
    ) -> Plan:
        key = (device, staged, *[None if t is None else (t.shape, t.dtype) for t in dense])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[key] = Plan(dense, device, staged)
        return plan


class Staged:
    """Copies of tensors that wait for others: one product takes less than two."""

    def __init__(self, plan: Plan, count: int, part: int | None, *, as_is: bool) -> None:
        """Wait for those of the plan that come after so many, which may be read as they are."""
        self._plan = plan
        self._count = count
        self._part = part
        self._as_is = as_is

    def finish(self, tensors: Sequence[torch.Tensor | None]) -> tuple[list[int], list[int]]:
        """Return the digests of what was copied, and of these."""
        with torch.no_grad(), _no_modes():
            read = tensors if self._as_is else _read(tensors, part=self._part)
            found = self._plan.numbers(read, self._count)
        return found[: self._count], found[self._count :]


def _forms(tensors: Sequence[torch.Tensor | None]) -> list[_Form | None]:
    """Return what decides how each tensor is read; it is looked at twice in every step."""
    return [
        None
        if t is None
        else (type(t), t.shape, t.dtype, t.layout, t.is_cpu, t.is_neg(), t.is_conj())
        for t in tensors
    ]


def _no_modes() -> contextlib.AbstractContextManager[object]:
    # A mode of the user's, such as one that counts operators, must not see ours.
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _without_modes()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _without_modes():  # type: ignore[no-untyped-def]  # noqa: ANN202
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _read(
    tensors: Sequence[torch.Tensor | None], *, sampled: bool = False, part: int | None = None
) -> list[torch.Tensor | None]:
    """Return what is to be read of each tensor."""
    if part is not None:
        tensors = [None if t is None else part_of(t, part) for t in tensors]
    return [None if t is None else _dense(t, sampled=sampled) for t in tensors]


def _dense(tensor: torch.Tensor, *, sampled: bool) -> torch.Tensor:
    if type(tensor) not in _PLAIN:
        tensor = tensor.detach()
    elif tensor.layout == torch.strided and not tensor.data_ptr() and tensor.nbytes:
        # As sharding takes it away from what was gathered; to read it would end the program.
        raise RuntimeError("the memory of a tensor was taken away")
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_conj() or tensor.is_neg():
        # What such a tensor means is not what is in its memory.
        tensor = tensor.resolve_conj().resolve_neg()
    if sampled and is_sampled(tensor):
        tensor = sample(tensor)
    # Its `device.type` is a string that is made anew, which takes as long as all the rest.
    if not tensor.is_cpu and tensor.device.type not in _DEFERRED:
        tensor = tensor.cpu()
    return tensor
