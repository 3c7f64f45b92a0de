"""Does something as soon as the script has imported torch, and not before.

A script may set OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES and their like before it imports torch.
Importing torch ahead of it would make a different run of it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterTorch(MetaPathFinder):
    """Runs `act` once, at the end of the first `import torch`."""

    def __init__(self, act: Callable[[], None]) -> None:
        """Wait for the import; if torch is there already, act at once."""
        self._act = act
        if "torch" in sys.modules:
            act()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Let the usual finders find torch, and note when its module has been executed."""
        if fullname != "torch":
            return None
        self.close()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._act()

        # On the instance: whoever looks at torch.__spec__ later finds it as it always is.
        loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec

    def close(self) -> None:
        """Stop waiting."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
