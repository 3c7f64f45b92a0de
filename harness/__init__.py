"""crossrank: reproduce failures of distributed training, judged against a measured floor."""

from __future__ import annotations

__version__ = "0.1.0"
