"""The command line of a watched run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness.watch.answers.outputs import Outputs

DESCRIPTION = "Run an unedited training script under the watcher."
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

PATIENCE = 3.0
"""Seconds that a launcher gets to end the other ranks of its host, once the first has failed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was typed."""

    script: str
    """Path of a script, or the name of a module."""
    is_module: bool
    arguments: tuple[str, ...]
    quiet: bool
    folder: str | None
    hang_timeout: float | None
    outputs: Outputs
    unequal: tuple[str, ...]
    whole: bool
    record: str | None
    nudge: int | None
    audit_every: int | None
    words: tuple[str, ...] = ()
    """What stood before the script, for a process that is started like this one."""


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line up to the script; what follows belongs to the script.

    Raises:
        SystemExit: with 2, after a message, where it cannot be read.
    """
    parser = _Parser(
        prog="harness.watch",
        usage=USAGE,
        description=DESCRIPTION,
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
    parser.add_argument(
        "--unequal",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters that differ between ranks on purpose, such as 'experts.*'",
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="read large tensors whole at every update: a difference in one element of them is "
        "dated to its step, for some percent of the time of a step",
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="the script is the name of a module, as with python -m",
    )
    parser.add_argument("script", help="the training script, a .py file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    read = parser.parse_args(arguments)
    for option, folder in (("--record", read.record), ("--folder", read.folder)):
        if folder is not None and (why := _no_folder(folder)):
            parser.error(f"argument {option}: cannot make {folder}: {why}")
    return Options(
        script=read.script,
        is_module=read.is_module,
        unequal=tuple(read.unequal),
        whole=read.whole,
        arguments=tuple(read.arguments),
        quiet=read.quiet,
        folder=read.folder,
        hang_timeout=read.hang_timeout,
        outputs=Outputs(json=read.json, junit=read.junit, html=read.html).absolute(),
        record=read.record and str(Path(read.record).absolute()),
        nudge=read.nudge,
        audit_every=read.audit,
        words=tuple(arguments[: len(arguments) - len(read.arguments) - 1]),
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


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to wait; type seconds, such as 60")
    return seconds


def _no_folder(path: str) -> str:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error.strerror)
    return "" if os.access(path, os.W_OK) else "it cannot be written"


def refuse(message: str) -> NoReturn:
    """Say once on each host what will not do, and end with exit code 2.

    The first rank of a host speaks, and its launcher then ends the others. Whoever is still there
    after a while was started without one, or alone has it: it speaks as well.

    Raises:
        SystemExit: with 2.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PATIENCE)
    sys.stderr.write(message)
    sys.stderr.flush()
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # What the script is given may be nothing, which argparse does not know of a REMAINDER.
        said = message.replace("required: script, arguments", "required: script")
        hint = "options and other commands: python -m harness.watch --help"
        refuse(f"{self.format_usage()}{self.prog}: error: {said}\n  {hint}\n")
