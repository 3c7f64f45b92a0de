"""One optimizer of this rank: what there is to observe about it, and the digests at each phase."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness.watch.digests.digest import Digester, Staged, method_of
from harness.watch.digests.pending import Pending
from harness.watch.digests.sample import is_sampled, parts_of
from harness.watch.instruments.parameters import Held
from harness.watch.layout import GRADIENTS, PARAMETERS, START, Entry, Layout
from harness.watch.modules import Known, cohort_of, local_part
from harness.watch.schedule import part_at

OWN_STATE = ("ZeroRedundancyOptimizer",)
"""Optimizers whose state is divided among the ranks."""
AVERAGING = ("PostLocalSGDOptimizer",)
"""Optimizers between whose averages the replicas differ on purpose."""


_BIAS = 1 << 16
"""Elements that a bias has at most."""


class Stream:
    """An optimizer under observation; rebuilt when its parameters change."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        known: dict[int, Known],
        rank: int,
        *,
        whole: bool = False,
    ) -> None:
        """Take stock of the parameters of an optimizer.

        Args:
            optimizer: whose parameters.
            known: what is known of each of them, by `id`.
            rank: this one.
            whole: read all of a large tensor at every update, not samples or parts.
        """
        self._digest = Digester()
        self._whole = whole
        self._groups = optimizer.param_groups
        first = self._groups[0] if self._groups else {}
        settings = getattr(optimizer, "defaults", None) or first
        self._own = frozenset(map(str, settings)) - {"params", "param_names"}
        self._parameters: list[torch.Tensor] = []
        self._entries: list[Entry] = []
        self._settings: tuple[Any, ...] = ()
        self._fixed: list[Any] = []
        """The settings as they were read last, if they can only be replaced, not written to."""
        self._setting_entries: list[Entry] = []
        self._setting_digests: list[int] = []
        names = set[str]()
        for group_index, group in enumerate(self._groups):
            for index, parameter in enumerate(group["params"]):
                unnamed = f"param_groups[{group_index}]['params'][{index}]"
                about = known.get(id(parameter), Known(unnamed))
                name = about.name if about.name not in names else f"{about.name} ({unnamed})"
                names.add(name)
                self._parameters.append(parameter)
                self._entries.append(
                    Entry(
                        name=name,
                        kind="parameter",
                        shape=tuple(parameter.shape),
                        dtype=str(parameter.dtype).removeprefix("torch."),
                        cohort=cohort_of(parameter, rank, sharded=about.sharded),
                        wrapped=about.wrapped,
                        group=about.group,
                        constant=_is_constant(local_part(parameter)),
                        parts=0 if whole else parts_of(local_part(parameter)),
                        method=method_of(local_part(parameter)),
                    )
                )
        self._staged: Staged | None = None
        self._settings_before: list[int] = []
        self._ids = [id(p) for p in self._parameters]
        self._state = self._state_entries(optimizer)

    @property
    def sharded(self) -> int:
        """How many parameters this rank has a part of only."""
        return sum(bool(entry.cohort) for entry in self._entries)

    @property
    def parameters(self) -> int:
        """How many parameters there are."""
        return len(self._entries)

    @property
    def held(self) -> list[Held]:
        """The parameters, each with its name."""
        return [
            Held(entry.name, parameter, replicated=not entry.cohort)
            for entry, parameter in zip(self._entries, self._parameters, strict=True)
        ]

    def layout(self) -> Layout:
        """Return what the digests of each phase stand for."""
        gradients = tuple(
            Entry(
                name=entry.name,
                kind="gradient",
                # A frozen parameter has no gradient to be compared with its values.
                shape=entry.shape if parameter.requires_grad else None,
                dtype=entry.dtype,
                cohort=entry.cohort,
                wrapped=entry.wrapped,
                group=entry.group,
                sampled=not self._whole and is_sampled(local_part(parameter)),
                constant=_is_zero(parameter.grad),
                method=entry.method,
            )
            for entry, parameter in zip(self._entries, self._parameters, strict=True)
        )
        state = tuple(entry for entry, _ in self._state)
        return Layout(
            {
                START: (*self._entries, *state),
                GRADIENTS: (*self._setting_entries, *gradients),
                PARAMETERS: tuple(self._entries),
            }
        )

    def changed(self) -> bool:
        """Say whether the optimizer has other parameters, or other names of settings, by now."""
        ids = [id(p) for group in self._groups for p in group["params"]]
        return self._settings_changed() or ids != self._ids

    def _settings_changed(self) -> bool:
        """Read the settings, and say whether there are others than before, of whatever value."""
        values = [
            value for group in self._groups for key, value in group.items() if key in self._own
        ]
        # In most steps nobody has touched them.
        if len(values) == len(self._fixed) and all(map(operator.is_, values, self._fixed)):
            return False
        self._fixed = values if all(map(_is_fixed, values)) else []
        settings = tuple(map(_plain, values))
        if settings == self._settings:
            return False
        before = self._setting_entries
        self._settings = settings
        self._setting_entries, self._setting_digests = _settings(self._groups, self._own)
        return before != self._setting_entries

    def start(self) -> list[int]:
        """Return the digests of parameters, and of state that was loaded, before any update."""
        state = [value() for _, value in self._state]
        tensors = [value for value in state if isinstance(value, torch.Tensor)]
        digests = iter(self._digest([local_part(tensor) for tensor in tensors]))
        return self._digest(self._local()) + [
            next(digests) if isinstance(value, torch.Tensor) else _bits(value)[0] for value in state
        ]

    def before(self, update: int) -> list[int] | Pending | None:
        """Return the digests of settings and gradients before an update, or of samples of them.

        None if they will come with those of the parameters.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        parts = [None if grad is None else local_part(grad) for grad in gradients]
        # What the first gradients say of replicas and parts holds for the whole run.
        sampled = update > 0 and not self._whole
        if sampled:
            self._staged = self._digest.stage(parts, self._local(), part_at(update))
        if self._staged is not None:
            self._settings_before = self._setting_digests
            return None
        return self._digest.later(parts, sampled=sampled, before=self._setting_digests)

    def after(self, update: int) -> tuple[list[int] | None, list[int] | Pending]:
        """Return the digests that `before` owed, and those of the parameters after an update.

        Of large parameters they are those of a part, unless all is to be read.
        """
        if self._staged is None:
            part = None if self._whole else part_at(update)
            return None, self._digest.later(self._local(), part=part)
        gradients, parameters = self._staged.finish(self._local())
        self._staged = None
        return [*self._settings_before, *gradients], parameters

    def _local(self) -> list[torch.Tensor]:
        return [local_part(parameter) for parameter in self._parameters]

    def _state_entries(
        self, optimizer: torch.optim.Optimizer
    ) -> list[tuple[Entry, Callable[[], Any]]]:
        if type(optimizer).__name__ in OWN_STATE:
            return []
        found: list[tuple[Entry, Callable[[], Any]]] = []
        for entry, parameter in zip(self._entries, self._parameters, strict=True):
            # `state` is a defaultdict: indexing would create what is not there.
            state = optimizer.state.get(parameter, {})
            for key, value in sorted(state.items(), key=lambda item: str(item[0])):
                if isinstance(value, torch.Tensor | int | float):
                    found.append(
                        (
                            Entry(
                                name=entry.name,
                                kind=f"state {key}",
                                cohort=entry.cohort,
                                wrapped=entry.wrapped,
                                group=entry.group,
                                method=method_of(local_part(value))
                                if isinstance(value, torch.Tensor)
                                else "",
                            ),
                            functools.partial(operator.getitem, state, key),
                        )
                    )
        return found


def _is_constant(tensor: torch.Tensor) -> bool:
    """Say whether a bias or a scale is as it was initialised; larger tensors never are."""
    if not 0 < tensor.numel() <= _BIAS or tensor.layout != torch.strided or tensor.is_meta:
        return False
    with torch.no_grad():
        return bool((tensor == tensor.reshape(-1)[0]).all())


def _is_zero(gradient: torch.Tensor | None) -> bool:
    """Say whether nothing has reached a parameter, such as below a layer of zeros."""
    if gradient is None or gradient.layout != torch.strided or gradient.is_meta:
        return False
    with torch.no_grad():
        return not bool(local_part(gradient).any())


def _settings(groups: list[dict[str, Any]], own: frozenset[str]) -> tuple[list[Entry], list[int]]:
    """Return the settings that the optimizer's class has; what else a group holds is a note."""
    entries, digests = [], []
    for group, key, value in _each_setting(groups, own):
        digest, shown = _bits(value)
        entries.append(Entry(name=f"param_groups[{group}]['{key}']", kind="setting", values=shown))
        digests.append(digest)
    return entries, digests


def _each_setting(
    groups: list[dict[str, Any]], own: frozenset[str]
) -> Iterator[tuple[int, str, Any]]:
    for index, group in enumerate(groups):
        for key, value in group.items():
            if key not in own:
                continue
            if isinstance(value, tuple | list):
                for place, part in enumerate(value):
                    yield index, f"{key}[{place}]", part
            else:
                yield index, str(key), value


def _is_fixed(value: Any) -> bool:
    """Say whether a value stays what it is: the same object is the same value then."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, int | float | str | None)


def _plain(value: Any) -> Any:
    """Return what can be compared; other objects stand for their type, and are not."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    # Reading a number from a device would make the program wait for it.
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_cpu:
        return float(value)
    return type(value).__name__


def _bits(value: Any) -> tuple[int, bool]:
    """Return 64 bits for a value, and whether they are those of a number that can be shown."""
    value = _plain(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return struct.unpack("<q", struct.pack("<d", float(value)))[0], True
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True), False
