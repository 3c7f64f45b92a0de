"""The line of the user's own code that led to where we are."""

from __future__ import annotations

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


def call_site() -> str | None:
    """Return `path:line` of the innermost frame outside of torch and of the watcher."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
