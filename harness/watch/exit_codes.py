"""Exit codes of a watched run whose script itself ended with 0."""

from __future__ import annotations

NOTHING_FOUND = 0
DIVERGED = 20
NOT_OBSERVED = 22
"""The watcher could not see what it would have to compare, and says why."""
