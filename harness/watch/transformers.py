"""A callback for the Trainer of Hugging Face, for scripts that are not started under the watcher.

    trainer = Trainer(..., callbacks=[WatchCallback()])

Notebooks, and a service that starts the ranks by commands of its own, need it; else
`accelerate launch -m harness.watch train.py` sees the same without an edit, as with torchrun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

from harness.watch.starting.attaching import attach

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class WatchCallback(TrainerCallback):  # type: ignore[misc]
    """Watches every `train`; at exit the last rank prints the answer on stderr."""

    def __init__(
        self, *, folder: str | None = None, quiet: bool = False, audit_every: int | None = None
    ) -> None:
        """Take what `attach` takes.

        Args:
            folder: one that all hosts share; the default is a temporary one of this host.
            quiet: say something only if something is wrong.
            audit_every: audit every n-th update, the first one included.
        """
        self._options: dict[str, Any] = {
            "folder": folder,
            "quiet": quiet,
            "audit_every": audit_every,
        }

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Begin before the trainer wraps the model."""
        attach(given["model"], **self._options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Begin here if the callback was added later, or if the trainer has made a model since."""
        attach(given["model"], **self._options)
