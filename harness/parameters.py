"""Typed parameters of a scenario: check raw values against the dataclass, then build it."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from harness.errors import UsageError, did_you_mean


def build(params: type, values: Mapping[str, Any]) -> Any:
    """Return an instance of the dataclass `params` holding `values`.

    Lists become tuples where the field says so, and whole floats stay floats.

    Raises:
        UsageError: naming every unknown, missing, ill-typed and out-of-range value at once.
    """
    problems = violations(params, values)
    if problems:
        raise UsageError("\n".join(problems))
    hints = typing.get_type_hints(params)
    return params(**{name: _convert(value, hints[name]) for name, value in values.items()})


def violations(params: type, values: Mapping[str, Any], *, prefix: str = "scenario.") -> list[str]:
    """Return one sentence for each value that does not fit; empty if all fit."""
    hints = typing.get_type_hints(params)
    fields = {item.name: item for item in dataclasses.fields(params)}
    problems = [
        f"{prefix}{name} is not a parameter{did_you_mean(name, fields)}; "
        f"legal: {', '.join(prefix + legal for legal in fields)}"
        for name in values
        if name not in fields
    ]
    for name, item in fields.items():
        if name not in values:
            problems.append(f"{prefix}{name} is missing: it needs {_type_name(hints[name])}")
            continue
        value = values[name]
        if not _fits(value, hints[name]):
            problems.append(
                f"{prefix}{name}={value!r} is not {_type_name(hints[name])}: "
                f"type {prefix}{name}=VALUE"
            )
            continue
        problems += _range(prefix + name, value, item.metadata)
    return problems


def _range(name: str, value: Any, rules: Mapping[str, Any]) -> list[str]:
    low, high = rules.get("low"), rules.get("high")
    listed = value if isinstance(value, list | tuple) else [value]
    if "values" in rules and any(item not in rules["values"] for item in listed):
        legal = ", ".join(map(str, rules["values"]))
        return [f"{name}={value} is not legal; legal: {legal}"]
    numbers = [item for item in listed if item is not None]
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        return [f"{name}={value} is not finite: type {name}=VALUE"]
    if low is not None and not all(number >= low for number in numbers):
        return [f"{name}={value} is too small: at least {low}"]
    if high is not None and not all(number <= high for number in numbers):
        return [f"{name}={value} is too large: at most {high}"]
    return []


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (tuple, list):
        item = typing.get_args(hint)[0]
        return isinstance(value, list | tuple) and all(_fits(part, item) for part in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    options = typing.get_args(hint)
    return any(value is None if kind is type(None) else _fits(value, kind) for kind in options)


def _convert(value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        return tuple(_convert(part, typing.get_args(hint)[0]) for part in value)
    return float(value) if hint is float else value


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if hint in names:
        return names[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, list):
        return f"a list, each item {_type_name(args[0])}"
    return " or ".join("null" if arg is type(None) else _type_name(arg) for arg in args)
