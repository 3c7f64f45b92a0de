"""Watch a training run: are the replicas equal, and if not, since which step, rank and tensor.

    torchrun --nproc-per-node=4 -m harness.watch train.py ARGS...

or, in code: `from harness.watch import attach` and `attach(model, optimizer)`.
"""

from __future__ import annotations

from harness.watch.attach import attach

__all__ = ["attach"]
