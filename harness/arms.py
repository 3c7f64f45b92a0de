"""The arms of a scenario, one call each: what is neither place nor repeat is an option of `run`."""

from __future__ import annotations

from typing import Any

from harness.scenario import Arm, Role, Scalar


def one_process(about: str, *, name: str = "one_process", **options: Scalar) -> Arm:
    """Return a reference of one rank, with permuted repeats: the parameter `permutations`."""
    return _arm(Role.REFERENCE, name, about, {"ranks": 1, "repeats": "permutations", **options})


def reference(name: str, about: str, **options: Scalar) -> Arm:
    """Return an arm that is right."""
    return _arm(Role.REFERENCE, name, about, options)


def faulty(name: str, about: str, **options: Scalar) -> Arm:
    """Return an arm that fails as a user would have written it."""
    return _arm(Role.FAULTY, name, about, options)


def fixed(name: str, about: str, **options: Scalar) -> Arm:
    """Return an arm with one remedy."""
    return _arm(Role.FIXED, name, about, options)


def control(name: str, about: str, **options: Scalar) -> Arm:
    """Return an arm as noisy as the faulty one, without the fault."""
    return _arm(Role.CONTROL, name, about, options)


def _arm(role: Role, name: str, about: str, options: dict[str, Scalar]) -> Arm:
    places: Any = {key: options[key] for key in ("ranks", "repeats", "isolated") if key in options}
    rest = {key: value for key, value in options.items() if key not in places}
    return Arm(name=name, role=role, about=about, options=rest, **places)
