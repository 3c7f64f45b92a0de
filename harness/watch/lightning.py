"""A callback for Lightning, for scripts that are not started under the watcher.

    trainer = Trainer(..., callbacks=[WatchCallback()])

Notebooks, and a service that starts the ranks by commands of its own, need it; else
`python -m harness.watch train.py` sees the same without an edit, whoever starts the ranks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from harness.watch.starting.attaching import attach

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "lightning" not in sys.modules and "pytorch_lightning" in sys.modules:
    # The same package under its other name; both have classes of their own.
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class WatchCallback(Callback):  # type: ignore[misc]
    """Watches every `fit`; at exit the last rank prints the answer on stderr."""

    def __init__(
        self, *, folder: str | None = None, quiet: bool = False, audit_every: int | None = None
    ) -> None:
        """Take what `attach` takes.

        Args:
            folder: one that all hosts share; the default is a temporary one of this host.
            quiet: say something only if something is wrong.
            audit_every: audit every n-th update, the first one included.
        """
        super().__init__()
        self._options: dict[str, Any] = {
            "folder": folder,
            "quiet": quiet,
            "audit_every": audit_every,
        }

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin before the strategy wraps the model; the ranks know each other by then."""
        if stage == "fit":
            attach(pl_module, **self._options)
