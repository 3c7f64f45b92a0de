"""What is loaded into modules and optimizers, where, and whether it is the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.watch.digests.digest import Digester
from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches
from harness.watch.modules import local_part

MOST = 16
"""Loads of modules whose content is looked at."""


class Loads:
    """Observes `load_state_dict` of modules and optimizers."""

    def __init__(self, context: Context) -> None:
        """Put functions around torch's own."""
        self._context = context
        self._digest = Digester()
        self._looks = 0
        self._patches = Patches()
        for what, owner in (("module", torch.nn.Module), ("optimizer", torch.optim.Optimizer)):
            self._patches.around(
                owner, "load_state_dict", before=context.safely("loads", self._loads(what))
            )

    def close(self) -> None:
        """Put torch's own functions back."""
        self._patches.close()

    def _loads(self, what: str) -> Any:
        def before(loaded: Any, state: Any = None, *_: Any, **more: Any) -> None:
            content = self._content(more.get("state_dict", state)) if what == "module" else None
            self._context.journal.write(
                "load",
                what=what,
                content=content,
                at=call_site(),
                **{"class": type(loaded).__name__},
            )

        return before

    def _content(self, state: Any) -> int | None:
        """Return a number for what is loaded; None if that is not looked at."""
        if self._looks >= MOST or not isinstance(state, Mapping):
            return None
        self._looks += 1
        named = [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)]
        tensors = [local_part(value).detach() for _, value in named]
        if any(tensor.is_meta or tensor.layout != torch.strided for tensor in tensors):
            return None
        # Of numbers, so the same in every process.
        return hash(tuple(self._digest(tensors)))
