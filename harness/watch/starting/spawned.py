"""Ranks that the script starts itself, with torch.multiprocessing: they are watched as well."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.watch.exit_codes import NOTHING_FOUND
from harness.watch.starting.options import Options

_ROOT = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True)
class _Entry:
    """What a new process runs: the user's function, watched. It crosses over as a pickle."""

    act: Callable[..., None]
    options: Options
    answers: str
    """Folder for exit codes; the process that started the ranks ends with the worst."""

    def __call__(self, index: int, *args: Any) -> None:
        from harness.watch.answers.closing import close
        from harness.watch.starting.observing import begin

        try:
            watcher = begin(self.options)
        except Exception as error:
            print(f"crossrank: could not begin to watch: {error!r}", file=sys.stderr)
            self.act(index, *args)
            return
        outputs, quiet = self.options.outputs, self.options.quiet
        try:
            self.act(index, *args)
        except BaseException as error:
            close(watcher, script_code=1, quiet=quiet, outputs=outputs, error=error)
            raise
        code = close(watcher, script_code=0, quiet=quiet, outputs=outputs)
        (Path(self.answers) / str(index)).write_text(str(code), encoding="utf-8")


class Spawned:
    """Stands in for `torch.multiprocessing.start_processes` as long as the script runs."""

    def __init__(self, options: Options) -> None:
        """Replace it; `spawn` goes through it as well."""
        import torch.multiprocessing as of_torch

        self._options = options
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._owners = (of_torch, sys.modules["torch.multiprocessing.spawn"])
        self._original: Callable[..., Any] = of_torch.start_processes

        @functools.wraps(self._original)
        def start_processes(fn: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="crossrank-")
            # A new process gets this path. From a checkout the watcher was found through the
            # current directory, which made way for that of the script.
            if _ROOT not in sys.path:
                sys.path.append(_ROOT)
            return self._original(_Entry(fn, options, self._folder.name), *args, **kwargs)

        for owner in self._owners:
            owner.start_processes = start_processes  # type: ignore[attr-defined]

    def close(self) -> int | None:
        """Put it back; return the exit code that the ranks gave, or None if none was started."""
        for owner in self._owners:
            owner.start_processes = self._original  # type: ignore[attr-defined]
        if self._folder is None:
            return None
        codes = [
            int(path.read_text(encoding="utf-8")) for path in Path(self._folder.name).iterdir()
        ]
        self._folder.cleanup()
        return max(codes, default=NOTHING_FOUND)
