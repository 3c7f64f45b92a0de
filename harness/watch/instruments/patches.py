"""Functions of torch that are replaced by one which calls them, for as long as a watcher looks.

Only where torch has no hook of its own. The replacement passes arguments, results and exceptions
through untouched, and steps aside while a compiler traces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from harness.watch.instruments.compiling import is_compiling

Act = Callable[..., None]
_SKIPPED = f"{__file__} (for warnings like importlib._bootstrap)"
"""Where the replacement stands. A warning names the caller of what warns, and would name this file
in place of the program's line; frames of the import system are skipped, and known by such a name:
https://github.com/python/cpython/blob/3.13/Lib/warnings.py, `_is_internal_frame`."""


class _Replaced:
    """One function with a replacement in its place, which all that want to know of it share."""

    def __init__(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        """Put the replacement there."""
        self.owner = owner
        self.name = name
        self.original = original
        before: list[Act] = []
        after: list[Act] = []
        self.before, self.after = before, after

        def around(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            for act in before:
                act(*args, **kwargs)
            result = original(*args, **kwargs)
            for act in after:
                act(result, *args, **kwargs)
            return result

        around.__code__ = around.__code__.replace(co_filename=_SKIPPED)
        self.around = functools.update_wrapper(around, original)
        setattr(owner, name, around)

    @property
    def in_place(self) -> bool:
        """Whether nobody else has replaced it since."""
        return vars(self.owner).get(self.name) is self.around

    def leave(self) -> None:
        """Put the original back if nobody wants to know any more."""
        if not self.before and not self.after and self.in_place:
            setattr(self.owner, self.name, self.original)


_REPLACED: list[_Replaced] = []


class Patches:
    """What was replaced, to be put back."""

    def __init__(self) -> None:
        """Replace nothing yet."""
        self._asked: list[tuple[_Replaced, list[Act], Act]] = []

    def around(
        self, owner: Any, name: str, *, before: Act | None = None, after: Act | None = None
    ) -> None:
        """Call `before(*args, **kwargs)` and `after(result, *args, **kwargs)` around a function.

        Args:
            owner: the module or class that has the function.
            name: its name there; one that this version of torch lacks is left out.
            before: called with the arguments; must not raise. Whoever asks last is called first.
            after: called with the result too, and only if there is one; must not raise.
        """
        # From the class itself: an inherited method is replaced where it is defined.
        original = vars(owner).get(name)
        if not callable(original):
            return
        replaced = next((one for one in _REPLACED if one.around is original), None)
        if replaced is None:
            replaced = _Replaced(owner, name, original)
            _REPLACED.append(replaced)
        if before is not None:
            replaced.before.insert(0, before)
            self._asked.append((replaced, replaced.before, before))
        if after is not None:
            replaced.after.append(after)
            self._asked.append((replaced, replaced.after, after))

    def close(self) -> None:
        """Put everything back that nobody else has replaced since."""
        for replaced, acts, act in reversed(self._asked):
            acts.remove(act)
            replaced.leave()
            if not replaced.before and not replaced.after and replaced in _REPLACED:
                _REPLACED.remove(replaced)
        self._asked.clear()
