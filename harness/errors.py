"""Everything this project raises on purpose, each with the exit code a script can rely on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HarnessError(Exception):
    """Base of all errors raised on purpose; printed as one message, without a traceback."""

    exit_code = 1


class UsageError(HarnessError):
    """What was typed cannot be run: an unknown name, a wrong type, a value out of range."""

    exit_code = 2


class PrerequisiteError(HarnessError):
    """What was typed is right, but this machine lacks what it needs (devices, port, disk)."""

    exit_code = 12


class RecordError(HarnessError):
    """A record stream cannot be written or read."""

    exit_code = 12


class MissingRecord(HarnessError):
    """A judge asked for a record that is not there; its finding becomes `unknown`."""

    exit_code = 11


PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Failed to recv",
    "remote process exited",
    "unhandled system error",
    "Gloo connectFullMesh failed",
)
"""What gloo, NCCL and the store say in a rank whose peer has gone."""


def peer_was_lost(message: str) -> bool:
    """Say whether an error only tells that another rank went away."""
    return any(sign in message for sign in PEER_LOST)


def did_you_mean(word: str, legal: Iterable[str], *, most: int = 3) -> str:
    """Return `"; nearest: a, b"` for the legal names closest to `word`, or an empty string.

    The last part of a dotted name counts too, so that `stpes` finds `scenario.steps`.
    """
    names = list(dict.fromkeys(legal))
    near = difflib.get_close_matches(word, names, n=most, cutoff=0.6)
    tail = word.rsplit(".", 1)[-1]
    by_tail: dict[str, str] = {name.rsplit(".", 1)[-1]: name for name in names}
    for match in difflib.get_close_matches(tail, list(by_tail), n=most, cutoff=0.6):
        if by_tail[match] not in near:
            near.append(by_tail[match])
    return f"; nearest: {', '.join(near[:most])}" if near else ""
