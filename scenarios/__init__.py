"""The failure cases, one module each: the module's name is the scenario's name.

Nothing registers itself: `names` lists the files of this folder, `load` imports one of them.
Modules whose name starts with an underscore hold what scenarios share.

Scenarios of your own can live elsewhere: CROSSRANK_SCENARIOS=DIR adds DIR/<name>.py, with its
parameters in DIR/conf/scenario/<name>.yaml; several directories are separated like in PATH.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from harness.errors import UsageError, did_you_mean
from harness.scenario import Scenario

VARIABLE = "CROSSRANK_SCENARIOS"


def folders() -> list[Path]:
    """Return the directories that are searched, this one first."""
    more = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [Path(__file__).resolve().parent, *(Path(folder).resolve() for folder in more if folder)]


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


def load(name: str) -> Scenario:
    """Return the scenario of that name; imports its module, which imports no torch.

    Raises:
        UsageError: if there is no such scenario; lists the legal names.
    """
    legal = names()
    if name not in legal:
        raise UsageError(
            f"no scenario named {name!r}{did_you_mean(name, legal)}\n"
            f"legal: {', '.join(legal)}\n"
            "type `make list` to see what each one shows"
        )
    __path__[:] = [str(folder) for folder in folders()]
    scenario = importlib.import_module(f"scenarios.{name}").SCENARIO
    assert isinstance(scenario, Scenario)
    return scenario
