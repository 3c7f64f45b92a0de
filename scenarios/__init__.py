"""The failure cases, one module each: the module's name is the scenario's name.

Nothing registers itself: `names` lists the files of this folder, `load` imports one of them.
Modules whose name starts with an underscore hold what scenarios share.

Scenarios of your own can live elsewhere: CROSSRANK_SCENARIOS=DIR adds DIR/<name>.py, with its
parameters in DIR/conf/scenario/<name>.yaml; several directories are separated like in PATH.
"""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path

from harness.errors import UsageError, did_you_mean
from harness.scenario import Scenario

VARIABLE = "CROSSRANK_SCENARIOS"


def folders() -> list[Path]:
    """Return the directories that are searched, this one first.

    Raises:
        UsageError: if CROSSRANK_SCENARIOS names something that is no directory.
    """
    typed = [Path(word) for word in os.environ.get(VARIABLE, "").split(os.pathsep) if word]
    for folder in typed:
        if not folder.is_dir():
            raise UsageError(f"{VARIABLE} names {folder}, which is no directory")
    return [Path(__file__).resolve().parent, *(folder.resolve() for folder in typed)]


def names() -> list[str]:
    """Return the names of all scenarios, sorted."""
    found = {path.stem for folder in folders() for path in folder.glob("*.py")}
    return sorted(name for name in found if not name.startswith("_"))


def sources(name: str) -> list[Path]:
    """Return the files that make up a scenario: its module, its parts, and what all share."""
    others = {f"_{other}" for other in names() if other != name}
    found: list[Path] = []
    for folder in folders():
        for path in sorted(folder.rglob("*.py")):
            top = path.relative_to(folder).parts[0].removesuffix(".py")
            if top == name or (top.startswith("_") and top not in others):
                found.append(path)
    return found


def unknown(name: str) -> str:
    """Say that there is no such scenario, which come near, and where all of them are listed."""
    legal = names()
    near = did_you_mean(name, legal)
    holding = [one for one in legal if name and name.lower() in one]
    if holding and not near:
        near = f"; with that in its name: {', '.join(holding)}"
    return f"no scenario named {name!r}{near}\ntype `make list` to see all {len(legal)}"


def load(name: str) -> Scenario:
    """Return the scenario of that name; imports its module, which imports no torch.

    Raises:
        UsageError: if there is no such scenario (lists the legal names) or it cannot be imported.
    """
    legal = names()
    if name not in legal:
        raise UsageError(unknown(name))
    __path__[:] = [str(folder) for folder in folders()]
    try:
        scenario = importlib.import_module(f"scenarios.{name}").SCENARIO
    except Exception as error:
        raise UsageError(f"scenario {name} cannot be imported: {_where(error)}") from error
    if not isinstance(scenario, Scenario):
        raise UsageError(f"SCENARIO of scenario {name} is a {type(scenario).__name__}, no Scenario")
    return scenario


def _where(error: Exception) -> str:
    """Say what an import raised and at which line of which file."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{said} in {error.filename}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} at {frames[-1].filename}:{frames[-1].lineno}"
