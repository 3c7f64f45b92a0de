"""Commands of `python -m harness.watch` that watch nothing themselves."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import NoReturn

from harness.causes import Cause, catalogue
from harness.pipes import exit_code_of
from harness.watch.twin.command import diff, twin

WIDTH = 88
LINE = 120
"""Columns of the list of causes where its output is no terminal."""
NARROW = 40
"""With fewer columns left beside the names, what one sees stands below each."""


def command(name: str, arguments: Sequence[str]) -> int:
    """Run one of COMMANDS; return its exit code."""
    return exit_code_of(lambda: COMMANDS[name](arguments))


def _causes(arguments: Sequence[str]) -> int:
    # Not earlier: a watched script is to find no more modules imported than it would alone.
    import shutil

    parser = argparse.ArgumentParser(
        prog="python -m harness.watch causes", description="List the causes that can be named."
    )
    parser.add_argument("--json", action="store_true", help="as JSON, all texts included")
    options = parser.parse_args(arguments)
    causes = catalogue()
    if options.json:
        print(json.dumps([_fields(cause) for cause in causes.values()], indent=1))
        return 0
    width = max(map(len, causes))
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else LINE
    family = ""
    for cause in causes.values():
        if cause.family != family:
            family = cause.family
            print(f"\n{family}" if cause is not next(iter(causes.values())) else family)
        print("\n".join(_entry(cause, width, columns)))
    print("\nOne of them in full: python -m harness.watch explain CAUSE")
    return 0


def _entry(cause: Cause, width: int, columns: int) -> list[str]:
    left = min(columns, LINE) - width - 4
    if left >= NARROW:
        seen = textwrap.shorten(cause.sees, left, placeholder=" ...")
        return [f"  {cause.name:<{width}}  {seen}"]
    indent = "    "
    below = textwrap.wrap(
        cause.sees,
        max(columns, NARROW),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return [f"  {cause.name}", *below]


def _explain(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.watch explain",
        description="Say of a cause what one sees, why, how to be sure, and what to change.",
    )
    parser.add_argument("cause", help="a name from `python -m harness.watch causes`")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    causes = catalogue()
    if options.cause not in causes:
        _unknown(options.cause, list(causes))
    cause = causes[options.cause]
    print(json.dumps(_fields(cause), indent=1) if options.json else "\n".join(explanation(cause)))
    return 0


def explanation(cause: Cause) -> list[str]:
    """Return an entry of the catalogue as text."""
    lines = [f"{cause.name} ({cause.family})"]
    for title, content in (
        ("What you see", cause.sees),
        ("Why", cause.why),
        ("To be sure", cause.confirm),
        ("Change", cause.change),
    ):
        lines += ["", title, *_wrapped(content)]
    lines += ["", "In code", *(f"    {line}" for line in cause.fix.splitlines())]
    if cause.reported:
        lines += ["", "Reported", *_wrapped(", ".join(cause.reported))]
    return lines


def _wrapped(content: str) -> list[str]:
    return textwrap.wrap(content, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _fields(cause: Cause) -> dict[str, object]:
    return {name: value for name, value in vars(cause).items() if name != "rule"}


def _unknown(name: str, known: Sequence[str]) -> NoReturn:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?\n  " if close else ""
    print(
        f"harness.watch: there is no cause {name!r}; {hint}list them: "
        "python -m harness.watch causes",
        file=sys.stderr,
    )
    sys.exit(2)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "causes": _causes,
    "explain": _explain,
    "twin": twin,
    "diff": diff,
}
"""Word -> what it does with the words after it; returns the exit code."""
