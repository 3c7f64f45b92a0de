"""The typed command line: what Hydra composed, checked whole, all violations reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import scenarios
from harness import trackers
from harness.errors import UsageError, did_you_mean
from harness.parameters import build, violations
from harness.plural import number_of
from harness.scenario import Scenario
from launch.arguments import no_scenario
from launch.environment import torch_version

ENGINES = ("auto", "warm", "torchrun")
DEVICES = ("auto", "cpu", "cuda")
LONGEST_S = 30 * 86400
"""A month; torch's timeouts overflow some way above it."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, as typed, with every default filled in."""

    name: str
    scenario: Scenario
    params: Mapping[str, Any]
    gpus: int
    device: str
    engine: str
    port: int
    collective_timeout_s: float
    arm_timeout_s: float
    seed: int
    results: Path
    dry_run: bool
    quiet: bool
    json: bool
    tracker: str
    tracker_options: Mapping[str, Any]
    text: str
    """The resolved configuration as YAML."""


def read(
    cfg: DictConfig,
    problems: Sequence[str] = (),
    choices: Mapping[str, str | None] | None = None,
) -> Config:
    """Return the typed configuration.

    Args:
        cfg: what was composed.
        problems: what is known to be wrong already.
        choices: the option of each group; None = ask Hydra, which composed it.

    Raises:
        UsageError: naming all of them and every value that does not fit, at once.
    """
    try:
        data = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        said = f"{error.full_key!s}: " if error.full_key else ""
        raise UsageError("\n".join([*problems, said + str(error).splitlines()[0]])) from error
    assert isinstance(data, dict)
    if choices is None:
        from hydra.core.hydra_config import HydraConfig

        choices = HydraConfig.get().runtime.choices
    assert choices is not None
    name = choices.get("scenario")
    launch = data["launch"] or {}
    params = data.get("scenario") or {}
    scenario = scenarios.load(name) if name else None
    found = violations(scenario.params, params) if scenario else []
    found += _top(data, launch, scenario)
    if scenario and not found:
        found += scenario.check(build(scenario.params, params), data["gpus"])
    if scenario is None and not problems:
        found.append(no_scenario())
    found += trackers.check(choices.get("tracker") or "none", data["tracker"] or {})
    if problems or found or name is None or scenario is None:
        raise UsageError("\n".join([*problems, *found]))
    return Config(
        name=name,
        scenario=scenario.on(torch_version()),
        params=params,
        gpus=data["gpus"],
        device=data["device"],
        engine=launch["engine"],
        port=launch["port"],
        collective_timeout_s=float(launch["collective_timeout_s"]),
        arm_timeout_s=float(launch["arm_timeout_s"]),
        seed=data["seed"],
        results=Path(data["results"]),
        dry_run=data["dry_run"],
        quiet=data["quiet"],
        json=data["json"],
        tracker=choices.get("tracker") or "none",
        tracker_options=data["tracker"] or {},
        text=OmegaConf.to_yaml(cfg, resolve=True),
    )


def _top(
    data: Mapping[Any, Any], launch: Mapping[str, Any], scenario: Scenario | None
) -> list[str]:
    least = scenario.min_ranks if scenario else 1
    most = scenario.max_ranks if scenario else None
    problems = []
    gpus = data["gpus"]
    if not _whole(gpus):
        problems.append(f"gpus={gpus!r} is not a whole number: type gpus=4")
    elif gpus < least:
        problems.append(
            f"gpus={gpus}: this scenario needs at least {number_of(least, 'rank')}; "
            f"type gpus={least}"
        )
    elif most is not None and gpus > most:
        problems.append(
            f"gpus={gpus}: this scenario takes at most {number_of(most, 'rank')}; type gpus={most}"
        )
    if not _whole(data["seed"]) or not 0 <= data["seed"] < 2**63:
        problems.append(f"seed={data['seed']!r} is not a whole number from 0 to 2^63-1")
    for key in ("dry_run", "quiet", "json"):
        if not isinstance(data[key], bool):
            problems.append(f"{key}={data[key]!r} is neither true nor false")
    for name, value, legal in (
        ("device", data["device"], DEVICES),
        ("launch.engine", launch.get("engine"), ENGINES),
    ):
        if value not in legal:
            near = did_you_mean(str(value), legal)
            problems.append(f"{name}={value!r} is not legal{near}; legal: {', '.join(legal)}")
    if not _whole(launch.get("port")) or not 0 <= launch["port"] < 65536:
        problems.append(f"launch.port={launch.get('port')!r} is not a port from 0 (any) to 65535")
    for key in ("collective_timeout_s", "arm_timeout_s"):
        value = launch.get(key)
        number = not isinstance(value, bool) and isinstance(value, int | float)
        if not number or not 0 < float(value or 0) <= LONGEST_S:
            problems.append(
                f"launch.{key}={value!r} is not a number of seconds above 0, at most {LONGEST_S}"
            )
    if not isinstance(data["results"], str) or not data["results"]:
        problems.append(f"results={data['results']!r} is not a directory name: type results=./DIR")
    return problems


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
