"""The catalogue of causes, each with the rule that recognises it, and the diagnosis of a run."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from harness.causes.cause import Cause, Diagnosis, Strength, entered
from harness.watch.evidence import Evidence

__all__ = ["Cause", "Diagnosis", "Strength", "catalogue", "diagnose"]


@functools.cache
def catalogue() -> dict[str, Cause]:
    """Return all causes by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(entered().items(), key=lambda one: (one[1].family, one[0])))


def diagnose(evidence: Evidence) -> list[Diagnosis]:
    """Return what fits, the strongest first; nothing fits is an answer too.

    A rule that fails finds nothing: it must not take the answer of the others with it.
    """
    found = []
    for cause in catalogue().values():
        try:
            diagnosis = cause.diagnose(evidence)
        except Exception as error:
            diagnosis = Diagnosis(
                strength=Strength.FACT,
                because=(f"the rule itself failed: {type(error).__name__}: {error}",),
                explains=False,
                cause=cause.name,
            )
        if diagnosis is not None:
            found.append(diagnosis)
    diverged = evidence.divergence is not None
    return sorted(
        found,
        key=lambda d: (-(d.explains if diverged else 0), -d.strength, d.step or 0, d.cause),
    )
