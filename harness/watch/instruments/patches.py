"""Functions of torch that are replaced by one which calls them, for as long as a watcher looks.

Only where torch has no hook of its own. The replacement passes arguments, results and exceptions
through untouched, and steps aside while a compiler traces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class Patches:
    """What was replaced, to be put back."""

    def __init__(self) -> None:
        """Replace nothing yet."""
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def around(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Call `before(*args, **kwargs)` and `after(result, *args, **kwargs)` around a function.

        Args:
            owner: the module or class that has the function.
            name: its name there; one that this version of torch lacks is left out.
            before: called with the arguments; must not raise.
            after: called with the result too, and only if there is one; must not raise.
        """
        # From the class itself: an inherited method is replaced where it is defined.
        original = vars(owner).get(name)
        if not callable(original):
            return

        @functools.wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            if before is not None:
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                after(result, *args, **kwargs)
            return result

        setattr(owner, name, around)
        self._replaced.append((owner, name, original, around))

    def close(self) -> None:
        """Put everything back that nobody else has replaced since."""
        for owner, name, original, around in reversed(self._replaced):
            if vars(owner).get(name) is around:
                setattr(owner, name, original)
        self._replaced.clear()
