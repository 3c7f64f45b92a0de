"""Names of parameters as their user knows them, and which of them are replicas by construction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

_WRAPPERS = {
    "DistributedDataParallel": "module.",
    "DataParallel": "module.",
    "OptimizedModule": "_orig_mod.",
    "FullyShardedDataParallel": "_fsdp_wrapped_module.",
}
PLAIN = (torch.Tensor, nn.Parameter)
"""Types whose tensors are nothing but their memory."""
_INNER = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Known:
    """What is known about one parameter from the modules that hold it."""

    name: str
    wrapped: bool = False
    """Below DistributedDataParallel, which makes it equal on all ranks."""
    sharded: bool = False
    """Below FullyShardedDataParallel, so this rank has its own part of it."""
    group: str = ""
    """The ranks that DistributedDataParallel makes it equal on, where these are not all ranks."""


OnWrap = Callable[[nn.parallel.DistributedDataParallel, nn.Module], None]
"""Called with a wrapper that is being made, and the module that becomes its inner one."""


class Modules:
    """Remembers which modules a program has built; keeps none of them alive."""

    def __init__(self, on_wrap: OnWrap) -> None:
        """Start listening to torch's own hook for modules that become parts of others."""
        self._on_wrap = on_wrap
        # By id: a module may define an equality of its own.
        self._parents: dict[int, weakref.ref[nn.Module]] = {}
        self._handle: RemovableHandle = register_module_module_registration_hook(self._registered)

    def add(self, *models: nn.Module) -> None:
        """Make modules known that were built before."""
        for model in models:
            self._remember(model)
            for module in model.modules():
                if isinstance(module, nn.parallel.DistributedDataParallel):
                    self._on_wrap(module, module.module)

    def note(self, module: nn.Module) -> None:
        """Make a module known that nothing was registered with, such as a copy."""
        self._remember(module)

    def close(self) -> None:
        """Stop listening."""
        self._handle.remove()

    def known(self, parameters: Iterable[torch.Tensor]) -> dict[int, Known]:
        """Return what is known of each of the parameters, by `id`.

        Modules that hold none of them have no say in the names: a rank may well have modules
        that others lack, such as an average of the weights.
        """
        wanted = set(map(id, parameters))
        found: dict[int, Known] = {}
        naming: dict[int, nn.Module] = {}
        for root in self.roots():
            for name, parameter, group, sharded in _walk(root):
                wrapped = group is not None
                key = id(parameter)
                if key not in wanted:
                    continue
                before = found.get(key)
                if before is None:
                    found[key] = Known(name, wrapped, sharded, group or "")
                    naming[key] = root
                elif wrapped and not before.wrapped:
                    found[key] = replace(before, wrapped=True, group=group or "")
        titles = _titles(list({id(root): root for root in naming.values()}.values()))
        if len(titles) < 2:
            return found
        return {
            key: replace(about, name=f"{titles[id(naming[key])]}.{about.name}")
            for key, about in found.items()
        }

    def roots(self) -> Iterator[nn.Module]:
        """Yield the modules that are alive, hold parameters and are part of no other."""
        alive = (reference() for reference in list(self._parents.values()))
        modules = [module for module in alive if module is not None]
        inner = {id(child) for module in modules for child in module.children()}
        # In the order in which the program built them, which is the same on all ranks.
        yield from (m for m in modules if id(m) not in inner and any(True for _ in m.parameters()))

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        self._remember(parent)
        if isinstance(parent, nn.parallel.DistributedDataParallel) and name == "module" and child:
            # Torch calls this before the attribute is there.
            self._on_wrap(parent, child)

    def _remember(self, module: nn.Module) -> None:
        key = id(module)
        known = self._parents.get(key)
        if known is None or known() is not module:
            self._parents[key] = weakref.ref(module, lambda _: self._parents.pop(key, None))


def _titles(roots: Sequence[nn.Module]) -> dict[int, str]:
    titles: dict[int, str] = {}
    for root in roots:
        inner = root
        while type(inner).__name__ in _WRAPPERS:
            inner = next(iter(inner.children()))
        title = type(inner).__name__
        same = sum(other.split("#")[0] == title for other in titles.values())
        titles[id(root)] = f"{title}#{same + 1}" if same else title
    return titles


def group_of(wrapper: nn.parallel.DistributedDataParallel) -> str:
    """Return the ranks that a wrapper reduces over, '' where these are all."""
    try:
        ranks = sorted(dist.get_process_group_ranks(wrapper.process_group))
        whole = len(ranks) == dist.get_world_size()
    except (AttributeError, KeyError, RuntimeError, ValueError):
        # Not there yet, or gone by now.
        return ""
    return "" if whole else " ".join(map(str, ranks))


def _walk(root: nn.Module) -> Iterator[tuple[str, nn.Parameter, str | None, bool]]:
    """Yield parameters, each with the group of its wrapper, None where it has no wrapper."""
    wrapped_ids: dict[int, str] = {}
    sharded_ids: set[int] = set()
    for module in root.modules():
        kind = type(module).__name__
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ignored, group = set(getattr(module, "parameters_to_ignore", ())), group_of(module)
            for name, parameter in module.module.named_parameters():
                if name not in ignored:
                    wrapped_ids[id(parameter)] = group
        elif kind == "FullyShardedDataParallel":
            sharded_ids.update(map(id, module.parameters()))
    for name, parameter in root.named_parameters():
        yield (
            _plain(root, name),
            parameter,
            wrapped_ids.get(id(parameter)),
            (id(parameter) in sharded_ids),
        )


def _plain(root: nn.Module, name: str) -> str:
    module: nn.Module = root
    while (kind := type(module).__name__) in _WRAPPERS and name.startswith(_WRAPPERS[kind]):
        name = name.removeprefix(_WRAPPERS[kind])
        module = next(iter(module.children()))
    for inner in _INNER:
        name = name.replace(inner, "")
    return name


def cohort_of(parameter: torch.Tensor, rank: int, *, sharded: bool) -> str:
    """Return what distinguishes the ranks that hold different parts of a tensor, or ''."""
    mesh, placements = (
        getattr(parameter, "device_mesh", None),
        getattr(parameter, "placements", None),
    )
    if mesh is not None and placements is not None:
        place: Iterable[int] = mesh.get_coordinate() or (rank,)
        parts = [
            f"{placement} part {coordinate}"
            for placement, coordinate in zip(placements, place, strict=False)
            if not placement.is_replicate()
        ]
        return ", ".join(parts)
    if sharded or type(parameter).__name__ == "FlatParameter":
        return f"part of rank {rank}"
    return ""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that this rank has of a tensor; DTensors give their local shard."""
    if type(tensor) in PLAIN:
        # Asking a tensor for an attribute that it lacks takes longer than asking for its type.
        return tensor
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part
