"""The user's script, as the module __main__ that it would be without the watcher."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

from harness.watch.starting.options import USAGE, Options, refuse


def prepare(options: Options) -> tuple[types.CodeType, types.ModuleType]:
    """Return the script's code and the module in which to execute it; set argv and the path.

    Raises:
        SystemExit: with 2 and a message, if there is no such script; with 1, as Python would, if
            it is none.
    """
    # A module of its own under the name __main__, for good: what the script pickles, and what it
    # registers to run at exit, looks for it there.
    module = types.ModuleType("__main__")
    if options.is_module:
        # As python -m does, so that modules of the current directory are found.
        sys.path[0] = os.getcwd()  # noqa: PTH109
        spec, code = _module(options.script)
        path = spec.origin or options.script
        about = {"__spec__": spec, "__package__": spec.parent, "__loader__": spec.loader}
        module.__dict__.update(about)
    else:
        path = options.script
        code = _compiled(path)
        sys.path[0] = str(Path(path).resolve().parent)
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    sys.argv = [path, *options.arguments]
    return code, module


def _module(name: str) -> tuple[ModuleSpec, types.CodeType]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        _refuse(f"cannot import {name!r}: {error}")
    if spec is None or spec.loader is None:
        _refuse(f"there is no module {name!r} to run")
    try:
        code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        sys.exit(1)
    except (ImportError, AttributeError):
        code = None
    if code is None:
        _refuse(f"module {name!r} has no code to run")
    return spec, code


def _compiled(script: str) -> types.CodeType:
    try:
        with io.open_code(str(Path(script).absolute())) as file:
            source = file.read()
    except OSError as error:
        _refuse(f"cannot read the script {script!r}: {error.strerror}")
    try:
        return compile(source, script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        sys.exit(1)


def _refuse(what: str) -> NoReturn:
    refuse(f"harness.watch: {what}\n  {USAGE}\n")
