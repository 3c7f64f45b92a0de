"""The observers of torch.ao.quantization, which is deprecated: what to type once it is gone."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from harness.errors import PrerequisiteError


def quantization() -> Any:
    """Return the module torch.ao.quantization, without its warnings that it will be removed.

    Raises:
        PrerequisiteError: if this torch does not have it any more.
    """
    warnings.filterwarnings("ignore", module=r"torch\.ao")
    try:
        return importlib.import_module("torch.ao.quantization")
    except ImportError as error:
        raise PrerequisiteError(
            "this torch has no torch.ao.quantization any more, and its observers went with it\n"
            "type: python -m pip install 'torch<=2.13'"
        ) from error
