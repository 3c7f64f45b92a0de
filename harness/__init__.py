"""crossrank: reproduce failures of distributed training, judged against a measured floor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.frame import compare, load

__version__ = "0.1.0"
__all__ = ["__version__", "compare", "load"]


def __getattr__(name: str) -> Any:
    """Import `load` and `compare` when they are first asked for: they bring pandas with them."""
    if name in ("compare", "load"):
        from harness import frame

        return getattr(frame, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
