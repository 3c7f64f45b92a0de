"""Hand what was typed after `make` to Python, untouched.

make would expand `$`, and a shell would split at spaces and eat quotes, so no recipe may spell the
values out. But make leaves every `key=value` of its command line in the variable MAKEFLAGS of the
recipe's environment, with a fixed quoting; this reads it back and starts the module in its place.

    make_arguments.py all MODULE [FIXED ...]        every key=value is an argument of the module
    make_arguments.py only KEYS MODULE [FIXED ...]  the values of KEYS (comma-separated) are;
                                                    `key?` may be left out, `key*` is shell words
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

OURS = ("PYTHON", "VENV")
"""Keys that are for the Makefile itself."""


def overrides(makeflags: str) -> list[str]:
    """Return the `key=value` typed after make, in the order typed, from the text of MAKEFLAGS.

    make doubles every `$`, puts a backslash before blanks and backslashes, and lists the last
    definition first; what stands before the word `--` are its own options.
    """
    words = [word.group() for word in re.finditer(r"(?:[^ \t\\]|\\.)+", makeflags, re.DOTALL)]
    if "--" not in words:
        return []
    quoted = words[words.index("--") + 1 :]
    plain = [re.sub(r"\\(.)|\$\$", _unquote, word, flags=re.DOTALL) for word in quoted]
    return [word for word in reversed(plain) if "=" in word]


def _unquote(match: re.Match[str]) -> str:
    return match.group(1) or "$"


def arguments(mode: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return the arguments of the module for what was typed.

    Raises:
        ValueError: if a key is not one of the target's, or one of them is missing.
    """
    typed = [word for word in typed if word.split("=", 1)[0] not in OURS]
    if mode[0] == "all":
        return list(typed)
    legal = {key.rstrip("?*"): key for key in mode[1].split(",") if key}
    values = dict(word.split("=", 1) for word in typed)
    for key in values:
        if key not in legal:
            takes = ", ".join(f"{name}=" for name in legal) or "no keys"
            raise ValueError(f"no key {key!r} here: this target takes {takes}")
    result: list[str] = []
    for name, key in legal.items():
        if key.endswith("*"):
            result += shlex.split(values.get(name, ""))
        elif values.get(name):
            result.append(values[name])
        elif not key.endswith("?"):
            raise ValueError(f"this target needs {name}=...")
    return result


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without make's own variables, which a make below would obey."""
    ours = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MAKE_TERMOUT", "MAKE_TERMERR")
    return {name: value for name, value in environment.items() if name not in ours}


def main(command: Sequence[str]) -> None:
    """Become `python -m MODULE FIXED ... ARGUMENTS ...`."""
    mode, rest = (command[:1], command[1:]) if command[0] == "all" else (command[:2], command[2:])
    try:
        typed = arguments(mode, overrides(os.environ.get("MAKEFLAGS", "")))
    except ValueError as error:
        print(f"crossrank: {error}\ntype `make help` to see every target", file=sys.stderr)
        sys.exit(2)
    argv = [sys.executable, "-m", *rest, *typed]
    os.execve(sys.executable, argv, clean(os.environ))  # noqa: S606 no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
