"""Typed parameters: what fits is built as typed, what does not is named, all of it at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.parameters import build, violations
from harness.scenario import at_least, between, one_of


@dataclass(frozen=True, kw_only=True)
class Params:
    steps: int = field(metadata=at_least(1))
    scale: float
    share: float = field(metadata=between(0.0, 1.0))
    name: str
    kind: str = field(metadata=one_of("a", "b"))
    flag: bool
    sizes: tuple[int, ...] = field(metadata=at_least(1))
    label: str | None
    limit: float | None = field(metadata=at_least(0.0))


SOUND: dict[str, Any] = {
    **{"steps": 3, "scale": 2, "share": 0.5, "name": "x", "kind": "a", "flag": True},
    **{"sizes": [1, 2], "label": None, "limit": 1.5},
}


def test_what_fits_is_built_with_the_types_of_the_fields():
    params = build(Params, SOUND)

    assert params.scale == 2.0
    assert type(params.scale) is float
    assert params.sizes == (1, 2)
    assert params.label is None
    assert build(Params, SOUND | {"label": "x"}).label == "x"
    assert build(Params, SOUND | {"share": 0}).share == 0.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "scenario.steps=0 is too small: at least 1"),
        ("steps", True, "scenario.steps=True is not a whole number"),
        ("steps", 1.0, "scenario.steps=1.0 is not a whole number"),
        ("steps", "1", "scenario.steps='1' is not a whole number"),
        ("scale", "1", "scenario.scale='1' is not a number"),
        ("scale", True, "scenario.scale=True is not a number"),
        ("share", 1.5, "scenario.share=1.5 is too large: at most 1.0"),
        ("share", -0.1, "scenario.share=-0.1 is too small: at least 0.0"),
        ("share", float("nan"), "scenario.share=nan is not finite"),
        ("scale", float("-inf"), "scenario.scale=-inf is not finite"),
        ("name", 3, "scenario.name=3 is not a text"),
        ("kind", "c", "scenario.kind=c is not legal; legal: a, b"),
        ("flag", 1, "scenario.flag=1 is not true or false"),
        ("sizes", 3, "scenario.sizes=3 is not a list, each item a whole number"),
        ("sizes", [1, "x"], "scenario.sizes=[1, 'x'] is not a list, each item a whole number"),
        ("sizes", [1, 0], "scenario.sizes=[1, 0] is too small: at least 1"),
        ("label", 3, "scenario.label=3 is not a text or null"),
        ("limit", -1.0, "scenario.limit=-1.0 is too small: at least 0.0"),
        ("limit", "x", "scenario.limit='x' is not a number or null"),
    ],
)
def test_one_value_that_does_not_fit_is_one_sentence(name, value, message):
    (said,) = violations(Params, SOUND | {name: value})

    assert said.startswith(message)
    with pytest.raises(UsageError):
        build(Params, SOUND | {name: value})


def test_an_optional_number_with_a_range_may_be_absent():
    assert violations(Params, SOUND | {"limit": None}) == []
    assert build(Params, SOUND | {"limit": None}).limit is None


def test_all_violations_are_named_at_once():
    values = {**SOUND, "steps": 0, "share": 2, "flag": "yes", "stpes": 4}
    del values["name"]

    with pytest.raises(UsageError) as refused:
        build(Params, values)

    lines = str(refused.value).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("scenario.stpes is not a parameter; nearest: steps, sizes; legal: ")
    assert "scenario.name is missing: it needs a text" in lines


@given(
    st.sampled_from(sorted(SOUND)),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.integers() | st.text())
    | st.dictionaries(st.text(), st.none()),
)
def test_any_value_is_either_built_or_refused(name, value):
    values = SOUND | {name: value}

    if violations(Params, values):
        with pytest.raises(UsageError):
            build(Params, values)
    else:
        built = getattr(build(Params, values), name)
        assert built == (tuple(value) if isinstance(value, list) else value) or value != value
