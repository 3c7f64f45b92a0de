"""The typed command line: what Hydra composed, checked whole, all violations reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import scenarios
from harness.errors import UsageError, did_you_mean
from harness.parameters import violations
from harness.scenario import Scenario

CONF = Path(__file__).resolve().parent.parent / "conf"
ENGINES = ("auto", "warm", "torchrun")
DEVICES = ("auto", "cpu", "cuda")
WITH_VALUE = ("--cfg", "-c", "--info", "-i", "--package", "-p", "--config-dir", "-cd")
"""Flags of Hydra that take the next word as their value."""


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


def groups() -> dict[str, list[str]]:
    """Return the options of each group of conf/, by group name."""
    return {
        folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir()
    }


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's flags, with their values, and the overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        flag = word.startswith("-") or before in WITH_VALUE
        (flags if flag else overrides).append(word)
    return flags, overrides


def conf_folders() -> list[Path]:
    """Return the directories Hydra searches: this project's, then those of scenarios elsewhere."""
    return [CONF, *(folder / "conf" for folder in scenarios.folders()[1:])]


def check_arguments(argv: Sequence[str]) -> None:
    """Check the names of everything typed, before Hydra sees it.

    Raises:
        UsageError: naming every unknown key and group option at once, each with the nearest ones.
    """
    options = groups()
    options["scenario"] = scenarios.names()
    flags, typed = split(argv)
    several = bool({"-m", "--multirun"} & set(flags))
    problems = [problem for word in typed for problem in _syntax(word, several=several)]
    if problems:
        raise UsageError("\n".join(problems))
    chosen = {group: _default(group) for group in options}
    for word in typed:
        key, value = _key(word), word.partition("=")[2]
        if key not in options:
            continue
        names = [name.strip() for name in value.split(",")]
        for name in names:
            if key == "scenario" and name in ("", "null"):
                raise _no_scenario()
            if name not in (*options[key], "null"):
                legal = ", ".join(options[key])
                near = did_you_mean(name, options[key])
                problems.append(f"no {key} named {name!r}{near}; legal: {legal}")
        chosen[key] = names[0]
    if problems:
        raise UsageError("\n".join(problems))
    legal_keys = sorted(_legal_keys(chosen)) + list(options)
    for word in typed:
        if (key := _key(word)) not in legal_keys and not key.startswith("hydra"):
            problems.append(f"no key {key!r}{did_you_mean(key, legal_keys)}")
    if problems:
        raise UsageError("\n".join([*problems, f"legal: {', '.join(legal_keys)}"]))


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").partition("@")[0]


def _syntax(word: str, *, several: bool) -> list[str]:
    """Return what is wrong with the form of one override, whatever its key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if "=" not in word and not word.startswith("~"):
        return [f"{word!r} is not key=value"]
    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException as error:
        return [f"cannot read {word!r}: {str(error).splitlines()[0]}"]
    if parsed.is_sweep_override() and not several:
        return [
            f"{word} names several values: type make sweep for all of them, "
            f"or {_key(word)}=[{word.partition('=')[2]}] for one list"
        ]
    return []


def _no_scenario() -> UsageError:
    return UsageError(
        "no scenario chosen\n"
        f"legal: {', '.join(scenarios.names())}\n"
        "type scenario=NAME, or `make list` to see what each one shows"
    )


def _default(group: str) -> str | None:
    for entry in OmegaConf.load(CONF / "config.yaml").defaults:
        if isinstance(entry, DictConfig) and group in entry:
            value = entry[group]
            return None if value is None else str(value)
    return None


def _legal_keys(chosen: Mapping[str, str | None]) -> Iterable[str]:
    top = OmegaConf.load(CONF / "config.yaml")
    yield from (str(key) for key in top if key not in ("defaults", "hydra"))
    for group, name in chosen.items():
        for conf in conf_folders():
            path = conf / group / f"{name}.yaml"
            if path.exists():
                yield from (f"{group}.{key}" for key in OmegaConf.load(path))


def read(cfg: DictConfig) -> Config:
    """Return the typed configuration.

    Raises:
        UsageError: naming every value that does not fit, at once.
    """
    try:
        data = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UsageError(str(error).splitlines()[0]) from error
    assert isinstance(data, dict)
    from hydra.core.hydra_config import HydraConfig

    choices = HydraConfig.get().runtime.choices
    name = choices.get("scenario")
    if not name:
        raise _no_scenario()
    scenario = scenarios.load(name)
    launch = data["launch"] or {}
    params = data["scenario"] or {}
    problems = violations(scenario.params, params)
    problems += _top(data, launch, scenario)
    if problems:
        raise UsageError("\n".join(problems))
    return Config(
        name=name,
        scenario=scenario,
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


def _top(data: Mapping[Any, Any], launch: Mapping[str, Any], scenario: Scenario) -> list[str]:
    problems = []
    gpus = data["gpus"]
    if not _whole(gpus):
        problems.append(f"gpus={gpus!r} is not a whole number: type gpus=4")
    elif gpus < scenario.min_ranks:
        problems.append(
            f"gpus={gpus}: this scenario needs at least {scenario.min_ranks} "
            f"rank{'s' if scenario.min_ranks > 1 else ''}; type gpus={scenario.min_ranks}"
        )
    elif scenario.max_ranks is not None and gpus > scenario.max_ranks:
        problems.append(
            f"gpus={gpus}: this scenario takes at most {scenario.max_ranks} ranks; "
            f"type gpus={scenario.max_ranks}"
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
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            problems.append(f"launch.{key}={value!r} is not a number of seconds above 0")
    if not isinstance(data["results"], str) or not data["results"]:
        problems.append(f"results={data['results']!r} is not a directory name")
    return problems


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
