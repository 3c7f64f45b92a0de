"""`python -m launch key=value …`: compose the configuration once, run, judge, report.

Exit codes: 0 as expected, 10 unexpected, 11 inconclusive, 12 a prerequisite is missing,
2 the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from harness.pipes import print_nowhere

INTERRUPTED = 130
LOOKS = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--resolve")
"""Flags of Hydra that show something and run nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # Closed by whoever started us: the next file opened would get its number, and what a
            # rank prints would go into that. The lowest free number is the one that is missing.
            stream = open(os.devnull, "r+")  # noqa: PTH123, SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if will_run(arguments):
            from launch.warm import Warm

            # The server imports torch while this process composes the configuration.
            Warm.heat()
        from launch import command

        code = command.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read along has seen enough; the verdict of a run does not come this way.
        print_nowhere(sys.stdout)
        return 0
    except KeyboardInterrupt as error:
        print(": ".join(["interrupted", *map(str, error.args)]), file=sys.stderr)
        return INTERRUPTED


def will_run(arguments: Sequence[str]) -> bool:
    """Say whether these arguments will start ranks from the warm server, as far as names tell."""
    words = set(arguments)
    if sys.platform != "linux" or not any(word.startswith("scenario=") for word in words):
        return False
    if any(word.split("=")[0] in LOOKS for word in words):
        return False
    return not words & {"launch=torchrun", "dry_run=true", "dry_run=True", "launch.engine=torchrun"}


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sys.exit(code) if "coverage" in sys.modules else os._exit(code)
