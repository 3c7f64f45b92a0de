"""Run an unedited training script under the watcher.

torchrun --nproc-per-node=4 -m harness.watch [options] train.py ARGS...
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.watch.after_torch import AfterTorch
from harness.watch.commands import COMMANDS
from harness.watch.exit_codes import NOT_OBSERVED
from harness.watch.outputs import Outputs
from harness.watch.witness import leave_witness

if TYPE_CHECKING:
    from harness.watch.watcher import Watcher

PATIENCE = 30.0
"""Seconds that the other ranks get to exit, once the script has ended on all of them."""
USAGE = "torchrun --nproc-per-node=N -m harness.watch [options] train.py ARGS..."
EPILOG = """
other commands:
  python -m harness.watch causes           list the causes that can be named
  python -m harness.watch explain CAUSE    one of them: what you see, why, how to be sure, the fix
  python -m harness.watch twin --nproc 1,4 train.py ...   is N ranks the same training as one?
  python -m harness.watch diff A B         compare two runs recorded with --record

exit code, where the script itself ends with 0: 0 nothing found, 20 a fault was found, 21 the run
hung or a rank died and it is known where, 22 it could not be observed. One rank has it; torchrun
itself then ends with 1.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was typed."""

    script: str
    arguments: tuple[str, ...]
    quiet: bool
    folder: str | None
    hang_timeout: float | None
    outputs: Outputs
    record: str | None
    nudge: int | None
    audit_every: int | None


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line up to the script; what follows belongs to the script.

    Raises:
        SystemExit: with 2, after a message, where it cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="harness.watch",
        usage=USAGE,
        description=__doc__.partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", metavar="FILE", help="write the answer as JSON")
    parser.add_argument("--junit", metavar="FILE", help="write the answer as JUnit XML")
    parser.add_argument("--html", metavar="FILE", help="write the answer as a page")
    parser.add_argument(
        "--record", metavar="FOLDER", help="record gradients and parameters for `diff`"
    )
    parser.add_argument(
        "--nudge",
        type=int,
        metavar="SEED",
        help="move every parameter by one rounding step before training; a recorded run that was "
        "nudged is the floor of `diff`",
    )
    parser.add_argument(
        "--audit",
        type=every,
        metavar="every=N",
        help="replay every N-th update in one process, the first one included, and compare its "
        "gradients with the synchronised ones",
    )
    parser.add_argument(
        "--hang-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="end a run that is stuck for so long, with exit code 21, after saying why; if not "
        "typed, it is said after 300 and torch's own time limit ends it",
    )
    parser.add_argument("--quiet", action="store_true", help="speak only if something is wrong")
    parser.add_argument("--folder", help="a folder that all hosts share")
    parser.add_argument("script", help="the training script, a .py file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    read = parser.parse_args(arguments)
    return Options(
        script=read.script,
        arguments=tuple(read.arguments),
        quiet=read.quiet,
        folder=read.folder,
        hang_timeout=read.hang_timeout,
        outputs=Outputs(json=read.json, junit=read.junit, html=read.html).absolute(),
        record=read.record and str(Path(read.record).absolute()),
        nudge=read.nudge,
        audit_every=read.audit,
    )


def every(typed: str) -> int:
    """Read `every=50`.

    Raises:
        argparse.ArgumentTypeError: with the form it must have.
    """
    word, _, number = typed.rpartition("=")
    if word in ("", "every") and number.isdecimal() and int(number) > 0:
        return int(number)
    raise argparse.ArgumentTypeError(f"{typed!r} is not of the form every=N, such as every=50")


def main() -> None:
    """Run the script as `python script.py` would, and end as it ends."""
    if sys.argv[1:2] and sys.argv[1] in COMMANDS and not Path(sys.argv[1]).exists():
        sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
    options = parse(sys.argv[1:])
    code = _compiled(options.script)
    leave_witness()
    watch = _Watch(options)
    # Its own module under the name __main__, for good: what the script pickles, and what it
    # registers to run at exit, looks for it there.
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=options.script, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(Path(options.script).resolve().parent)
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

    def __init__(self, options: Options) -> None:
        self._options = options
        self._watcher: Watcher | None = None
        self._failed: str | None = None
        self._waiting = AfterTorch(self._begin)

    def close(self, script_code: int, error: BaseException | None = None) -> int:
        """Let the watcher answer; return the exit code."""
        self._waiting.close()
        if self._watcher is None:
            why = self._failed or "torch was not imported"
            print(f"crossrank: could not observe: {why}", file=sys.stderr)
            return script_code or NOT_OBSERVED
        from harness.watch.closing import close

        code = close(
            self._watcher,
            script_code=script_code,
            quiet=self._options.quiet,
            outputs=self._options.outputs,
            error=error,
        )
        if code and not script_code:
            self._watcher.wait_for_peers(PATIENCE)
        return code

    def _begin(self) -> None:
        try:
            from harness.watch.watcher import WATCHERS, Watcher

            self._watcher = WATCHERS[os.getpid()] = Watcher(
                folder=self._options.folder, hang_timeout=self._options.hang_timeout
            )
            self._watcher.stall.outputs = self._options.outputs
            if self._options.audit_every is not None:
                from harness.watch.audit.auditor import Auditor

                self._watcher.auditor = Auditor(self._watcher.context, self._options.audit_every)
            if self._options.record or self._options.nudge is not None:
                from harness.watch.twin.recorder import Nudge, Recorder

                if self._options.record:
                    self._watcher.recorder = Recorder(self._options.record, self._watcher.context)
                if self._options.nudge is not None:
                    Nudge(self._options.nudge)
        except Exception as error:
            self._failed = f"could not begin to watch: {error!r}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait; type seconds, such as 60")
    return seconds


def _compiled(script: str) -> types.CodeType:
    try:
        with io.open_code(str(Path(script).absolute())) as file:
            source = file.read()
    except OSError as error:
        print(
            f"harness.watch: cannot read the script {script!r}: {error.strerror}\n  {USAGE}",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        return compile(source, script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        sys.exit(1)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    main()
