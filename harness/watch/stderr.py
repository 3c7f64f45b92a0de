"""Where the watcher speaks: on stderr, where it does not mix with what the script prints."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print in one piece."""
    # One write: the ranks share a stream, and lines of two ranks must not run into each other.
    sys.stderr.write(f"crossrank: {text}\n")
    sys.stderr.flush()
