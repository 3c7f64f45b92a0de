"""Ranks that the script starts by starting itself again: they are watched as well.

Lightning does so where no launcher has started it: for each further rank of the host it runs the
same command with another LOCAL_RANK.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.watch.starting.options import Options

_ROOT = str(Path(__file__).resolve().parents[3])

# The exit code of such a rank stays the script's own: who started it takes any other for a crash,
# and kills all ranks. From a checkout the new process has to be told where the watcher is.
_BOOT = (
    "import sys; sys.path.count({root!r}) or sys.path.append({root!r}); "
    "from harness.watch.__main__ import main; main(relaunched=True)"
)


class Relaunched:
    """Stands in for `subprocess.Popen.__init__` as long as the script runs."""

    def __init__(self, options: Options) -> None:
        """Replace it; a command that does not start the script as another rank is left alone."""
        self._options = options
        self._script = options.script if options.is_module else os.path.abspath(options.script)  # noqa: PTH100
        self._processes: list[subprocess.Popen[Any]] = []
        self._original: Callable[..., None] = subprocess.Popen.__init__

        @functools.wraps(self._original)
        def init(popen: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
            command = args[0] if args else kwargs.get("args")
            watched = self.watched(command, kwargs.get("env"))
            if watched is None:
                self._original(popen, *args, **kwargs)
                return
            if args:
                args = (watched, *args[1:])
            else:
                kwargs["args"] = watched
            self._original(popen, *args, **kwargs)
            self._processes.append(popen)

        subprocess.Popen.__init__ = init  # type: ignore[assignment, method-assign]

    def watched(self, command: Any, environment: Any) -> list[str] | None:
        """Return the command that runs the script under the watcher, or None if it runs another.

        Args:
            command: what the script is about to start.
            environment: the environment it gives to it; None is its own.
        """
        if not isinstance(command, Sequence) or isinstance(command, str | bytes) or not environment:
            return None
        if not {"LOCAL_RANK", "WORLD_SIZE"} <= set(environment):
            return None
        words = [str(word) for word in command]
        if self._options.is_module and words[1:2] == ["-m"]:
            del words[1]
        # A package that is run as a module has a module of its own for that.
        names = [self._script] + [f"{self._script}.__main__"] * self._options.is_module
        if words[:1] != [sys.executable] or not words[1:] or words[1] not in names:
            return None
        boot = [sys.executable, "-c", _BOOT.format(root=_ROOT)]
        return [*boot, *self._options.words, self._script, *words[2:]]

    def close(self, patience: float) -> None:
        """Put it back; wait for the ranks, at most so many seconds.

        This is the process whose exit code is looked at, so it has to be the one that answers.
        """
        subprocess.Popen.__init__ = self._original  # type: ignore[method-assign]
        deadline = time.monotonic() + patience
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
