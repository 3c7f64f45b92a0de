"""What was typed, word by word: form, keys and group options, checked before Hydra sees them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import scenarios
from harness.errors import did_you_mean

CONF = Path(__file__).resolve().parent.parent / "conf"
HYDRA_KEY = re.compile(r"hydra($|[./])")
"""Keys that are Hydra's own business."""
WITH_VALUE = (
    *("--cfg", "-c", "--info", "-i", "--package", "-p", "--config-dir", "-cd"),
    *("--config-name", "-cn", "--config-path", "-cp", "--experimental-rerun"),
)
"""Flags of Hydra that take the next word as their value."""


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


def check(argv: Sequence[str]) -> Typed:
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
        return _without_values(name) if group == "scenario" else ""
    if name in ("", "null"):
        if group == "scenario":
            return no_scenario()
        if _default(group) is None:
            return ""
        return f"{group} cannot be empty; legal: {', '.join(legal)}"
    if group == "scenario":
        return scenarios.unknown(name)
    return f"no {group} named {name!r}{did_you_mean(name, legal)}; legal: {', '.join(legal)}"


def _without_values(name: str) -> str:
    """Return where the values of a scenario's parameters are missing; empty if they are there."""
    values = [conf / "scenario" / f"{name}.yaml" for conf in conf_folders()]
    if any(path.exists() for path in values):
        return ""
    places = zip(scenarios.folders(), values, strict=True)
    path = next(path for folder, path in places if (folder / f"{name}.py").exists())
    return f"scenario {name} has no values for its parameters: write them into {path}"


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


def no_scenario() -> str:
    """Say that no scenario was chosen, and where all of them are listed."""
    return (
        "no scenario chosen\n"
        f"type scenario=NAME; `make list` says what each of the {len(scenarios.names())} shows"
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
