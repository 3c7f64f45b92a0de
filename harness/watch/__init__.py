"""Watch a training run: are the replicas equal, and if not, since which step, rank and tensor.

    torchrun --nproc-per-node=4 -m harness.watch train.py ARGS...

or, in code: `from harness.watch import attach` and `attach(model, optimizer)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.watch.starting.attaching import attach

__all__ = ["attach"]


def __getattr__(name: str) -> Any:
    """Import `attach`, and torch with it, when it is asked for: a watched script comes first.

    Its module must have another name: an imported submodule would take the place of the function.
    """
    if name == "attach":
        from harness.watch.starting.attaching import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
