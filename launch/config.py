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


def conf_folders() -> list[Path]:
    """Return the directories Hydra searches: this project's, then those of scenarios elsewhere."""
    return [CONF, *(folder / "conf" for folder in scenarios.folders()[1:])]


def check_arguments(argv: Sequence[str]) -> None:
    """Check the names of everything typed, before Hydra sees it.

    Raises:
        UsageError: naming every unknown key and group option at once, each with the nearest ones.
    """
    options = groups()
    typed = [word for word in argv if not word.startswith("-") or "=" in word.lstrip("-")]
    typed = [word for word in typed if not word.startswith("--")]
    chosen = {group: _default(group) for group in options}
    problems: list[str] = []
    for word in typed:
        key, equals, value = word.partition("=")
        key = key.lstrip("+~").partition("@")[0]
        if not equals and not word.startswith("~"):
            problems.append(f"{word!r} is not key=value")
        elif key in options:
            names = [name.strip() for name in value.split(",")] if value else []
            for name in names:
                legal = scenarios.names() if key == "scenario" else options[key]
                if name not in legal and name not in ("null", "*"):
                    problems.append(
                        f"no {key} named {name!r}{did_you_mean(name, legal)}; "
                        f"legal: {', '.join(legal)}"
                    )
            chosen[key] = names[:1] and names[0] or None
    if not problems:
        legal = list(_legal_keys(chosen))
        for word in typed:
            key = word.partition("=")[0].lstrip("+~").partition("@")[0]
            if key in legal or key in options or key.startswith("hydra"):
                continue
            keys = sorted(key for key in legal if not key.startswith("hydra"))
            shown = ", ".join(keys + list(options))
            problems.append(
                f"no key {key!r}{did_you_mean(key, keys + list(options))}; legal: {shown}"
            )
    if problems:
        raise UsageError("\n".join(problems))


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
        raise UsageError(
            "no scenario chosen\n"
            f"legal: {', '.join(scenarios.names())}\n"
            "type scenario=NAME, or `make list` to see what each one shows"
        )
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
