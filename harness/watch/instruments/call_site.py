"""The line of the user's own code that led to where we are."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).resolve().parents[2] / "watch"),
    "<frozen ",
    "<string>",
)


_MOST = 10_000
"""Files that are remembered; notebooks and generated code have a new one for every cell."""
_FRAMEWORK = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]"
    r"(?:accelerate|lightning|lightning_fabric|pytorch_lightning|transformers)[/\\]"
)


_OURS, _USERS, _FRAMEWORKS = range(3)
_WHOSE: dict[str, int] = {}
"""File -> whose code it holds; asked for many times a step."""


def _whose(name: str) -> int:
    if name.startswith(_LIBRARIES):
        found = _OURS
    else:
        found = _USERS if _FRAMEWORK.search(name) is None else _FRAMEWORKS
    if len(_WHOSE) < _MOST:
        _WHOSE[name] = found
    return found


def call_site() -> str | None:
    """Return `path:line` of the innermost frame outside of torch and of the watcher.

    Inside a training framework it is the innermost frame of the user's own that the framework has
    called, such as a method that was overridden. That its trainer was started says nothing.
    """
    framework: str | None = None
    own: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        whose = _WHOSE.get(name)
        if whose is None:
            whose = _whose(name)
        if whose != _OURS:
            here = f"{name}:{frame.f_lineno}"
            if whose == _USERS:
                if framework is None:
                    return here
                own = own or here
            elif own is not None:
                return own
            else:
                framework = framework or here
        frame = frame.f_back
    return framework or own
