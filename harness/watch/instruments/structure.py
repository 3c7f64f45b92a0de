"""What a module is made of, as far as the ranks have to agree on it."""

from __future__ import annotations

from typing import Any

from torch import nn

from harness.watch.instruments.call_site import call_site

MOST = 4096


def structure(module: nn.Module) -> dict[str, Any]:
    """Return names, shapes, dtypes and requires_grad in the order of registration."""
    return {
        "class": type(module).__name__,
        "at": call_site(),
        "parameters": [
            [name, list(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad]
            for name, p in module.named_parameters()
        ][:MOST],
        "buffers": [
            [name, list(b.shape), str(b.dtype).removeprefix("torch.")]
            for name, b in module.named_buffers()
        ][:MOST],
    }
