"""Exit codes of a watched run whose script itself ended with 0."""

from __future__ import annotations

NOTHING_FOUND = 0
FAULT_FOUND = 20
"""Replicas differ, or what the program was seen doing is a fault although they agree."""
STOPPED = 21
"""The run hung or a rank died, and where that began is known."""
NOT_OBSERVED = 22
"""The watcher could not see what it would have to compare, and says why."""
