"""Where whoever reads the output has gone away: what a command does and returns stays the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import IO


def print_nowhere(stream: IO[str]) -> None:
    """Let what is still printed go nowhere; the interpreter flushes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def exit_code_of(command: Callable[[], int]) -> int:
    """Return the exit code of a command, once its output is flushed; 0 if nobody reads that.

    Where argparse ends it, after --help or a mistake, there is output to flush too.
    """
    try:
        code = _returned(command)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read along has seen enough.
        print_nowhere(sys.stdout)
        return 0
    return code


def _returned(command: Callable[[], int]) -> int:
    try:
        return command()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
