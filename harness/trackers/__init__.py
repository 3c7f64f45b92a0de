"""Where the series of a run can go afterwards: trackers by name, fed from the records.

The parent publishes once the verdict is there, so that no rank ever waits for a tracker and none
can cost a run its verdict. A tracker is a module of this package with the two functions of
`Tracker`; it imports its library only when it publishes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from harness.errors import HarnessError, UsageError, did_you_mean
from harness.plan import Layout
from harness.scenario import Scenario
from harness.tables import Tables
from harness.verdict import Verdict

TRACKERS = {"none": "harness.trackers.none", "wandb": "harness.trackers.wandb"}
"""Module by name."""


class TrackerError(HarnessError):
    """A tracker did not take the run; the records and the verdict are where they were."""

    exit_code = 12


class Tracker(Protocol):
    """What a module of this package offers."""

    def check(self, options: Mapping[str, Any]) -> list[str]:
        """Return what is wrong with the options, one sentence each; empty if nothing is."""

    def publish(
        self,
        options: Mapping[str, Any],
        layout: Layout,
        scenario: Scenario,
        tables: Tables,
        verdict: Verdict,
        config: Mapping[str, Any],
    ) -> str:
        """Hand over the series of every rank, the claims and the config; say where they went."""


def tracker(name: str) -> Tracker:
    """Return the tracker of that name.

    Raises:
        UsageError: if there is none; lists the legal names.
    """
    if name not in TRACKERS:
        raise UsageError(
            f"tracker={name} is not known{did_you_mean(name, TRACKERS)}\n"
            f"legal: {', '.join(TRACKERS)}"
        )
    return cast("Tracker", importlib.import_module(TRACKERS[name]))


def check(name: str, options: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a tracker's options, before anything starts.

    Raises:
        UsageError: if there is no tracker of that name.
    """
    return tracker(name).check(options)


def publish(
    name: str,
    options: Mapping[str, Any],
    layout: Layout,
    scenario: Scenario,
    tables: Tables,
    verdict: Verdict,
    config: Mapping[str, Any],
) -> str:
    """Hand a finished run to a tracker and return one line that says where it went.

    Raises:
        UsageError: if there is no such tracker, or its options are wrong.
        PrerequisiteError: if its library is not installed.
        TrackerError: if it failed.
    """
    chosen = tracker(name)
    if wrong := chosen.check(options):
        raise UsageError("\n".join(wrong))
    return chosen.publish(options, layout, scenario, tables, verdict, config)
