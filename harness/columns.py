"""Records as parallel columns, one entry for each recorded value: what Parquet and pandas take.

A number stands in `value` as float64 and its `text` is missing; True and False are 1 and 0. A
text stands in `text` and its `value` is NaN. A recorded null has the text "null", so that it can
be told from a recorded NaN, which has none. An int that no float64 equals has its nearest float64
in `value` (an infinity beyond the range) and its digits in `text`. Lone surrogates, which neither
Arrow nor pandas can hold, are written as their escapes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import RecordError
from harness.record import Value

if TYPE_CHECKING:
    import numpy.typing as npt

NULL = "null"
"""The text of a recorded null."""
EXACT = 2.0**53
"""Below it every int is a float64."""
PENDING = 1 << 19
"""Values held as Python objects before they are packed: bounds the memory of a long run."""


@dataclass(frozen=True, kw_only=True)
class Category:
    """A column of few different texts."""

    codes: npt.NDArray[np.int32]
    names: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """One entry per recorded value, in the order in which each rank recorded."""

    run: Category
    scenario: Category
    arm: Category
    repeat: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    step: npt.NDArray[np.int64]
    phase: Category
    metric: Category
    value: npt.NDArray[np.float64]
    text: npt.NDArray[np.object_]
    time: npt.NDArray[np.float64]


class _Names:
    """Texts numbered in order of first appearance."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}

    def code(self, name: str) -> int:
        code = self.codes.get(name)
        return self.codes.setdefault(encodable(name), len(self.codes)) if code is None else code

    def category(self, codes: npt.NDArray[np.int32]) -> Category:
        return Category(codes=codes, names=list(self.codes))


class Builder:
    """Collects the records of one run."""

    def __init__(self, *, run: str, scenario: str) -> None:
        """Take what is the same in every row."""
        self._run = run
        self._scenario = scenario
        self._arms, self._phases, self._metrics = _Names(), _Names(), _Names()
        self._shapes: dict[tuple[str, ...], int] = {}
        # One entry per record ...
        self._arm, self._rank, self._repeat = array("i"), array("i"), array("i")
        self._step, self._time = array("q"), array("d")
        self._phase, self._shape = array("i"), array("i")
        # ... and one per value.
        self._pending: list[Any] = []
        self._value = array("d")
        self._texts: dict[int, str] = {}

    def add(
        self,
        arm: str,
        rank: int,
        *,
        repeat: int,
        step: int,
        phase: str,
        time: float,
        metrics: Mapping[str, Value],
    ) -> None:
        """Append one record.

        Raises:
            RecordError: if a value is neither number, text nor null.
        """
        names = tuple(metrics)
        shape = self._shapes.get(names)
        if shape is None:
            shape = self._shapes[names] = len(self._shapes)
        self._arm.append(self._arms.code(arm))
        self._rank.append(rank)
        self._repeat.append(repeat)
        self._step.append(step)
        self._time.append(time)
        self._phase.append(self._phases.code(phase))
        self._shape.append(shape)
        self._pending.extend(metrics.values())
        if len(self._pending) > PENDING:
            self._pack()

    def build(self) -> Columns:
        """Return everything added."""
        self._pack()
        coded = [
            np.array([self._metrics.code(name) for name in names], np.int32)
            for names in self._shapes
        ]
        shape = np.array(self._shape, np.int32)
        lengths = np.array([len(codes) for codes in coded], np.int64)
        counts = lengths[shape] if coded else np.zeros(0, np.int64)
        total = len(self._value)
        # Where a record's metrics start among the rows, and its shape's among the codes.
        rows = np.cumsum(counts) - counts
        shapes = (np.cumsum(lengths) - lengths)[shape] if coded else rows
        metric = np.arange(total) + np.repeat(shapes - rows, counts)
        flat = np.concatenate(coded) if coded else np.zeros(0, np.int32)
        text = np.full(total, None, object)
        text[np.fromiter(self._texts, np.int64, len(self._texts))] = list(self._texts.values())

        def spread(column: array[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
            return np.repeat(np.array(column, dtype), counts)

        constant = np.zeros(total, np.int32)
        return Columns(
            run=Category(codes=constant, names=[encodable(self._run)]),
            scenario=Category(codes=constant, names=[encodable(self._scenario)]),
            arm=self._arms.category(spread(self._arm, np.int32)),
            repeat=spread(self._repeat, np.int32),
            rank=spread(self._rank, np.int32),
            step=spread(self._step, np.int64),
            phase=self._phases.category(spread(self._phase, np.int32)),
            metric=self._metrics.category(flat[metric]),
            value=np.array(self._value, np.float64),
            text=text,
            time=spread(self._time, np.float64),
        )

    def _pack(self) -> None:
        """Move the pending values into the column of float64."""
        start = len(self._value)
        values, self._pending = self._pending, []
        try:
            packed = array("d", values)
        except (TypeError, OverflowError):
            packed = array(
                "d",
                [
                    v if v.__class__ is float else self._number(at, v)
                    for at, v in enumerate(values, start)
                ],
            )
        else:
            large = np.abs(np.array(packed)) >= EXACT
            for at in np.flatnonzero(large).tolist():
                self._number(start + at, values[at])
        self._value.extend(packed)

    def _number(self, at: int, value: Value) -> float:
        """Return what stands in `value`, and note what stands in `text`."""
        if isinstance(value, float):
            return value
        if isinstance(value, int):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf if value > 0 else -math.inf
            if number != value:
                self._texts[at] = str(value)
            return number
        if value is not None and not isinstance(value, str):
            raise RecordError(f"a recorded value is {value!r}: neither number, text nor null")
        self._texts[at] = NULL if value is None else encodable(value)
        return math.nan


def encodable(text: str) -> str:
    r"""Return the text with lone surrogates as escapes: `"\udc80"` becomes `"\\udc80"`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
