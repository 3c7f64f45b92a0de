"""The records stay in the run directory and go nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.plan import Layout
from harness.scenario import Scenario
from harness.tables import Tables
from harness.verdict import Verdict


def check(options: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the options: there are none to give."""
    return [f"tracker.{name} means nothing under tracker=none" for name in options]


def publish(
    options: Mapping[str, Any],
    layout: Layout,
    scenario: Scenario,
    tables: Tables,
    verdict: Verdict,
    config: Mapping[str, Any],
) -> str:
    """Do nothing and have nothing to say."""
    return ""
