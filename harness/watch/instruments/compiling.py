"""Whether a compiler or a transform looks at the program, asked at every hook."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling


def is_compiling() -> bool:
    """Say what `torch.compiler.is_compiling` says, in a third of its time."""
    # Dynamo puts True in place of the first call; the flag is that of the other compilers.
    return is_dynamo_compiling() or torch.compiler._is_compiling_flag


def is_transforming() -> bool:
    """Say whether a transform of torch.func is at work, whose tensors have no memory to read."""
    return torch._C._functorch.peek_interpreter_stack() is not None
