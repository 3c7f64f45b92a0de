"""Run an unedited training script under the watcher.

torchrun --nproc-per-node=4 -m harness.watch [options] train.py ARGS...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.watch.commands import COMMANDS, command
from harness.watch.exit_codes import NOT_OBSERVED
from harness.watch.hangs.witness import leave_witness
from harness.watch.starting.after_torch import AfterTorch
from harness.watch.starting.options import Options, parse
from harness.watch.starting.script import prepare

if TYPE_CHECKING:
    from harness.watch.starting.relaunched import Relaunched
    from harness.watch.starting.spawned import Spawned
    from harness.watch.watcher import Watcher

PATIENCE = 30.0
"""Seconds that the other ranks get to exit, once the script has ended on all of them."""


def main(*, relaunched: bool = False) -> None:
    """Run the script as `python script.py` would, and end as it ends.

    Args:
        relaunched: a rank that the script has started has started this one, and answers.
    """
    if sys.argv[1:2] and sys.argv[1] in COMMANDS and not Path(sys.argv[1]).exists():
        sys.exit(command(sys.argv[1], sys.argv[2:]))
    options = parse(sys.argv[1:])
    code, module = prepare(options)
    leave_witness()
    watch = _Watch(options, relaunched=relaunched)
    try:
        exec(code, module.__dict__)  # noqa: S102
    except SystemExit as exit_:
        ended = _exit_code(exit_.code)
        watched = watch.close(ended)
        if ended or not watched:
            raise
        sys.exit(watched)
    except KeyboardInterrupt:
        watch.close(130)
        raise
    except BaseException as error:
        # Without the frames of this file, and through the hook that the script may have installed.
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        watch.close(1, error)
        sys.exit(1)
    sys.exit(watch.close(0))


class _Watch:
    """The watcher, which begins with the script's own import of torch."""

    def __init__(self, options: Options, *, relaunched: bool = False) -> None:
        self._options = options
        self._is_relaunched = relaunched
        self._watcher: Watcher | None = None
        self._spawned: Spawned | None = None
        self._relaunched: Relaunched | None = None
        self._failed: str | None = None
        self._waiting = AfterTorch(self._begin)

    def close(self, script_code: int, error: BaseException | None = None) -> int:
        """Let the watcher answer; return the exit code."""
        code = self._close(script_code, error)
        return script_code if self._is_relaunched else code

    def _close(self, script_code: int, error: BaseException | None) -> int:
        self._waiting.close()
        if self._relaunched is not None:
            # Ranks whose peer has failed may never end.
            self._relaunched.close(0 if script_code else PATIENCE)
        if self._watcher is None:
            why = self._failed or "torch was not imported"
            print(f"crossrank: could not observe: {why}", file=sys.stderr)
            return script_code or NOT_OBSERVED
        ranks = None if self._spawned is None else self._spawned.close()
        if ranks is not None:
            # The ranks that the script has started have answered for themselves.
            self._watcher.close()
            return script_code or ranks
        from harness.watch.answers.closing import close

        code = close(
            self._watcher,
            script_code=script_code,
            quiet=self._options.quiet,
            outputs=self._options.outputs,
            error=error,
        )
        if code and not script_code:
            self._watcher.presence.wait_for_peers(PATIENCE)
        return code

    def _begin(self) -> None:
        try:
            from harness.watch.starting.observing import begin
            from harness.watch.starting.relaunched import Relaunched
            from harness.watch.starting.spawned import Spawned

            self._watcher = begin(self._options)
            self._spawned = Spawned(self._options)
            self._relaunched = Relaunched(self._options)
        except Exception as error:
            self._failed = f"could not begin to watch: {error!r}"


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    main()
