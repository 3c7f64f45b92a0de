"""The typed command line: what Hydra composed, checked whole, all violations reported at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import scenarios
from harness import trackers
from harness.errors import UsageError, did_you_mean
from harness.parameters import build, violations
from harness.scenario import Scenario

CONF = Path(__file__).resolve().parent.parent / "conf"
ENGINES = ("auto", "warm", "torchrun")
DEVICES = ("auto", "cpu", "cuda")
LONGEST_S = 30 * 86400
"""A month; torch's timeouts overflow some way above it."""
HYDRA_KEY = re.compile(r"hydra($|[./])")
"""Keys that are Hydra's own business."""
WITH_VALUE = (
    *("--cfg", "-c", "--info", "-i", "--package", "-p", "--config-dir", "-cd"),
    *("--config-name", "-cn", "--config-path", "-cp", "--experimental-rerun"),
)
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


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What was typed: the words Hydra can take, and what is wrong with the others."""

    sound: tuple[str, ...]
    problems: tuple[str, ...]


def check_arguments(argv: Sequence[str]) -> Typed:
    """Check form and names of everything typed, before Hydra sees it.

    Every unknown key and group option gets a sentence with the names nearest to it.
    """
    options = groups()
    options["scenario"] = scenarios.names()
    flags, typed = split(argv)
    several = bool({"-m", "--multirun"} & set(flags))
    chosen = {group: _default(group) for group in options}
    problems: dict[str, list[str]] = {word: _syntax(word, options, several) for word in typed}
    for word in typed:
        key, _, value = word.partition("=")
        if key not in options or problems[word]:
            continue
        names = [name.strip() for name in value.split(",")]
        problems[word] = [said for name in names if (said := _choice(key, name, options[key]))]
        if key == "sweep" and not several and names != ["null"]:
            problems[word] = [f"{word} is a prepared sweep: type make sweep {word}"]
        elif key == "sweep" and len(names) > 1:
            problems[word] = [f"{word}: one prepared sweep at a time"]
        if not problems[word]:
            chosen[key] = names[0]
    if not any(_key(word) == "scenario" for word in typed):
        chosen["scenario"] = _prepared(chosen["sweep"])
    legal = sorted(_legal_keys(chosen)) + list(options)
    unknown = chosen["scenario"] is None
    strange = False
    for word in typed:
        key = _key(word)
        unsure = unknown and key.startswith("scenario.")
        if problems[word] or key in legal or unsure or HYDRA_KEY.match(key):
            continue
        problems[word] = [f"no key {key!r}{did_you_mean(key, legal)}"]
        strange = True
    told = [line for lines in problems.values() for line in lines]
    if strange:
        told.append(f"legal: {', '.join(legal)}")
    sound = [
        word
        for word in typed
        if not problems[word] and not (unknown and _key(word).startswith("scenario."))
    ]
    return Typed(sound=(*flags, *sound), problems=tuple(told))


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").partition("@")[0]


def _choice(group: str, name: str, legal: Sequence[str]) -> str:
    """Return what is wrong with the choice of one option of a group; empty if nothing is."""
    if name in legal:
        return ""
    if name in ("", "null"):
        if group == "scenario":
            return _no_scenario()
        if _default(group) is None:
            return ""
        return f"{group} cannot be empty; legal: {', '.join(legal)}"
    return f"no {group} named {name!r}{did_you_mean(name, legal)}; legal: {', '.join(legal)}"


def _syntax(word: str, groups: Iterable[str], several: bool) -> list[str]:
    """Return what is wrong with the form of one override, whatever its key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, sign, value = word.partition("=")
    if word[:1] in ("+", "~") and not HYDRA_KEY.match(_key(word)):
        return [f"{word}: no key can be added or taken away; type {_key(word)}=VALUE to set one"]
    if not sign and not word.startswith("~"):
        return [f"{word!r} is not key=value"]
    if "@" in key:
        return [f"{word}: a group has one place here; type {_key(word)}=NAME"]
    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException as error:
        return [f"cannot read {word!r}: {str(error).splitlines()[0]}"]
    if parsed.is_sweep_override() and not several:
        plain = key not in groups and "(" not in value
        one = f", or {key}=[{value}] for one list" if plain else ", or one of them here"
        return [f"{word} names several values: type make sweep for all of them{one}"]
    return []


def _no_scenario() -> str:
    return (
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


def _prepared(sweep: str | None) -> str | None:
    """Return the scenario that a prepared sweep chooses."""
    path = CONF / "sweep" / f"{sweep}.yaml"
    prepared: Any = OmegaConf.load(path) if path.exists() else {}
    for entry in prepared.get("defaults", ()):
        if isinstance(entry, DictConfig) and "override /scenario" in entry:
            return str(entry["override /scenario"])
    return None


def _legal_keys(chosen: Mapping[str, str | None]) -> Iterable[str]:
    top = OmegaConf.load(CONF / "config.yaml")
    yield from (str(key) for key in top if key not in ("defaults", "hydra"))
    for group, name in chosen.items():
        # A prepared sweep sets keys that are here already, and adds none.
        for conf in conf_folders() if group != "sweep" else ():
            path = conf / group / f"{name}.yaml"
            if path.exists():
                yield from (f"{group}.{key!s}" for key in OmegaConf.load(path))


def read(cfg: DictConfig, problems: Sequence[str] = ()) -> Config:
    """Return the typed configuration; `problems` are those that are known already.

    Raises:
        UsageError: naming all of them and every value that does not fit, at once.
    """
    try:
        data = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        said = f"{error.full_key!s}: " if error.full_key else ""
        raise UsageError("\n".join([*problems, said + str(error).splitlines()[0]])) from error
    assert isinstance(data, dict)
    from hydra.core.hydra_config import HydraConfig

    choices = HydraConfig.get().runtime.choices
    name = choices.get("scenario")
    launch = data["launch"] or {}
    params = data.get("scenario") or {}
    scenario = scenarios.load(name) if name else None
    found = violations(scenario.params, params) if scenario else []
    found += _top(data, launch, scenario)
    if scenario and not found:
        found += scenario.check(build(scenario.params, params), data["gpus"])
    if scenario is None and not problems:
        found.append(_no_scenario())
    found += trackers.check(choices.get("tracker") or "none", data["tracker"] or {})
    if problems or found or name is None or scenario is None:
        raise UsageError("\n".join([*problems, *found]))
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
            f"gpus={gpus}: this scenario needs at least {least} "
            f"rank{'s' if least > 1 else ''}; type gpus={least}"
        )
    elif most is not None and gpus > most:
        problems.append(f"gpus={gpus}: this scenario takes at most {most} ranks; type gpus={most}")
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
