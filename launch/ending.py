"""How a command that starts ranks is interrupted, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from harness.errors import HarnessError
from harness.pipes import exit_code_of
from launch.words import Help

INTERRUPTED = 130


def run(command: Callable[[], int]) -> NoReturn:
    """Run a command to the end of the process, with its exit code.

    What people do wrong prints no traceback, SIGTERM is Ctrl-C, and the interpreter's own end is
    left out: it would wait for what the libraries of ranks have started.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    code = answered(command)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if "coverage" in sys.modules:
        sys.exit(code)
    os._exit(code)


def answered(command: Callable[[], int]) -> int:
    """Return the exit code of a command, and print what it raises for people to read."""
    try:
        return exit_code_of(command)
    except Help as asked:
        print(asked)
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except HarnessError as error:
        print(f"crossrank: {error}", file=sys.stderr)
        return error.exit_code


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
