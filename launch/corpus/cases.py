"""What a corpus is made of: each chosen scenario at each number of ranks, or why it cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import scenarios
from harness.errors import HarnessError, PrerequisiteError, UsageError, did_you_mean
from harness.parameters import build, violations
from harness.plural import number_of
from harness.scenario import Scenario
from launch import devices
from launch.compose import compose, values
from launch.config import Config
from launch.devices import Place

FAILED = "failed"
SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One scenario at one number of ranks."""

    name: str
    gpus: int
    scenario: Scenario | None
    """None if its module cannot be imported."""
    config: Config | None = None
    place: Place | None = None
    state: str = ""
    """Empty if it can run; `skipped` if it is not for so many ranks or not for this machine;
    `failed` if it is broken."""
    problem: str = ""
    """Why it cannot run."""

    @property
    def weight(self) -> int:
        """How long it takes, roughly: the processes of all arms with their repeats."""
        if self.scenario is None or self.config is None:
            return 0
        total = 0
        for arm in self.scenario.arms:
            repeats = arm.repeats
            if isinstance(repeats, str):
                repeats = 1 + int(self.config.params[repeats])
            total += repeats * min(arm.ranks or self.gpus, self.gpus)
        return total


def cases(
    names: Sequence[str],
    family: str,
    gpus: Sequence[int],
    *,
    seed: int,
    device: str,
    launch: str,
    results: Path,
) -> list[Case]:
    """Return every case, in the order of names and ranks.

    Raises:
        UsageError: if a name or the family is not known; nothing else stops the rest.
    """
    available = devices.cuda_devices() if device != "cpu" else 0
    found = []
    for name, scenario, problem in chosen(names, family):
        for ranks in gpus:
            if scenario is None:
                found.append(
                    Case(name=name, gpus=ranks, scenario=None, state=FAILED, problem=problem)
                )
                continue
            state, problem = _unfit(name, scenario, ranks)
            config = place = None
            if not state:
                try:
                    place = devices.choose(ranks, device, available)
                    config = compose(
                        name, gpus=ranks, results=results, seed=seed, device=device, launch=launch
                    )
                except PrerequisiteError as error:
                    state, problem = SKIPPED, str(error)
                except HarnessError as error:
                    state, problem = FAILED, str(error)
            found.append(
                Case(
                    name=name,
                    gpus=ranks,
                    scenario=scenario,
                    config=config,
                    place=place,
                    state=state,
                    problem=problem,
                )
            )
    return found


def chosen(names: Sequence[str], family: str) -> list[tuple[str, Scenario | None, str]]:
    """Return name, scenario and problem of each scenario asked for; no names = all there are.

    A scenario that cannot be imported comes along with the reason, unless a family is asked for.

    Raises:
        UsageError: if a name or the family is not known; says what is.
    """
    legal = scenarios.names()
    for name in names:
        if name not in legal:
            raise UsageError(scenarios.unknown(name))
    found: list[tuple[str, Scenario | None, str]] = []
    for name in names or legal:
        try:
            found.append((name, scenarios.load(name), ""))
        except HarnessError as error:
            found.append((name, None, str(error)))
    if not family:
        return found
    families = sorted({item.family for _, item, _ in found if item})
    if family not in families:
        raise UsageError(
            f"no family {family!r}{did_you_mean(family, families)}\nlegal: {', '.join(families)}"
        )
    return [item for item in found if item[1] and item[1].family == family]


def _unfit(name: str, scenario: Scenario, gpus: int) -> tuple[str, str]:
    """Return state and reason of a scenario that its default values keep from so many ranks."""
    try:
        params = values(name)
        wrong = violations(scenario.params, params)
        if wrong:
            return FAILED, "\n".join(wrong)
        if gpus < scenario.min_ranks:
            return SKIPPED, f"needs at least {number_of(scenario.min_ranks, 'rank')}"
        if scenario.max_ranks is not None and gpus > scenario.max_ranks:
            return SKIPPED, f"takes at most {number_of(scenario.max_ranks, 'rank')}"
        said = scenario.check(build(scenario.params, params), gpus)
        return (SKIPPED, "\n".join(said)) if said else ("", "")
    except HarnessError as error:
        return FAILED, str(error)
    except Exception as error:
        return FAILED, f"its check raised {type(error).__name__}: {error}"
