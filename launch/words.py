"""The `key=value` words of a command that is not Hydra's: read by one table, refused by name.

`--key value` and `--key=value` mean the same as `key=value`, and `--key` alone sets a switch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UsageError, did_you_mean

Reader = Callable[[str], Any]
"""Turns the text of a value into what it means; ValueError says what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a command."""

    about: str
    read: Reader
    default: Any = None
    needed: bool = False
    """True if the command cannot do without it."""


def parse(argv: Sequence[str], keys: Mapping[str, Key], command: str) -> dict[str, Any]:
    """Return the value of every key.

    Raises:
        UsageError: naming every word that does not fit and what to type, all at once.
        Help: if help is asked for; holds the text.
    """
    if {"--help", "-h"} & set(argv):
        raise Help(usage(keys, command))
    typed, problems = _typed(argv, keys)
    values = {name: key.default for name, key in keys.items()}
    for name, text in typed.items():
        if name not in keys:
            problems.append(f"no key {name!r}{did_you_mean(name, keys)}; legal: {', '.join(keys)}")
            continue
        try:
            values[name] = keys[name].read(text)
        except ValueError as error:
            problems.append(f"{name}={text}: {error}")
    missing = [name for name, key in keys.items() if key.needed and name not in typed]
    problems += [f"{name}=... is needed: {keys[name].about}" for name in missing]
    if problems:
        raise UsageError("\n".join(dict.fromkeys(problems)))
    return values


class Help(Exception):
    """Help was asked for."""


def usage(keys: Mapping[str, Key], command: str) -> str:
    """Return what can be typed, a line for each key."""
    width = max(map(len, keys)) + 1
    lines = [f"  {name + '=':{width}}  {key.about}" for name, key in keys.items()]
    return "\n".join([f"{command} [key=value ...]", *lines])


def _typed(argv: Sequence[str], keys: Mapping[str, Key]) -> tuple[dict[str, str], list[str]]:
    found: dict[str, str] = {}
    problems = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, sign, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not sign and word.startswith("--"):
            switch = name in keys and keys[name].read is switched
            value = "true" if switch or not words else words.pop(0)
        elif not sign:
            problems.append(f"{word!r} is not key=value; legal keys: {', '.join(keys)}")
            continue
        if value:
            found[name] = value
    return found, problems


def text(value: str) -> str:
    """Return the value as it stands."""
    return value


def path(value: str) -> Path:
    """Return a path."""
    return Path(value)


def names(value: str) -> list[str]:
    """Return comma-separated names."""
    return [name.strip() for name in value.strip("[]").split(",") if name.strip()]


def switched(value: str) -> bool:
    """Return true or false."""
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if value.lower() not in known:
        raise ValueError("is neither true nor false")
    return known[value.lower()]


def whole(low: int, high: int | None = None) -> Reader:
    """Return a reader of one whole number in a range."""

    def read(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise ValueError("is not a whole number") from None
        if number < low or (high is not None and number > high):
            raise ValueError(f"is not {_range(low, high)}")
        return number

    return read


def wholes(low: int, high: int | None = None) -> Reader:
    """Return a reader of comma-separated whole numbers in a range, each once, in order."""
    one = whole(low, high)

    def read(value: str) -> list[int]:
        return sorted({one(word) for word in names(value)})

    return read


def one_of(*legal: str) -> Reader:
    """Return a reader of one of some names."""

    def read(value: str) -> str:
        if value not in legal:
            raise ValueError(f"is not legal{did_you_mean(value, legal)}; legal: {', '.join(legal)}")
        return value

    return read


def _range(low: int, high: int | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"
