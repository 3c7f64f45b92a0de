"""The failure cases, one module each: the module's name is the scenario's name.

Nothing registers itself: `names` lists the files of this folder, `load` imports one of them.
Modules whose name starts with an underscore hold what scenarios share.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from harness.errors import UsageError, did_you_mean
from harness.scenario import Scenario


def names() -> list[str]:
    """Return the names of all scenarios, sorted."""
    return sorted(
        path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_")
    )


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
    scenario = importlib.import_module(f"scenarios.{name}").SCENARIO
    assert isinstance(scenario, Scenario)
    return scenario
