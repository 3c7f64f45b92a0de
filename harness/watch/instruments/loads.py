"""What is loaded into modules and optimizers, and where."""

from __future__ import annotations

from typing import Any

import torch

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches


class Loads:
    """Observes `load_state_dict` of modules and optimizers."""

    def __init__(self, context: Context) -> None:
        """Put functions around torch's own."""
        self._context = context
        self._patches = Patches()
        for what, owner in (("module", torch.nn.Module), ("optimizer", torch.optim.Optimizer)):
            self._patches.around(
                owner, "load_state_dict", before=context.safely("loads", self._loads(what))
            )

    def close(self) -> None:
        """Put torch's own functions back."""
        self._patches.close()

    def _loads(self, what: str) -> Any:
        def before(loaded: Any, *_: Any, **__: Any) -> None:
            self._context.journal.write(
                "load", what=what, at=call_site(), **{"class": type(loaded).__name__}
            )

        return before
