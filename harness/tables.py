"""The records of one run, aligned by arm, rank, repeat, step and phase: what a judge reads.

Absent records are never agreement: every look-up that finds nothing raises `MissingRecord`, which
makes the finding `unknown`. Needs no process group and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness import record
from harness.errors import MissingRecord, RecordError, peer_was_lost
from harness.plan import Layout, Plan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float64]

Moment = tuple[int, int, str]
"""(repeat, step, phase)."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place, in the order in which a rank executed, where two ranks differ."""

    step: int
    phase: str
    metric: str
    ranks: tuple[int, int]
    values: tuple[record.Value, record.Value]


class Tables:
    """All streams of one run."""

    def __init__(
        self,
        plan: Plan,
        streams: Mapping[str, Mapping[int, record.Stream]],
        *,
        sealed: bool = False,
    ) -> None:
        """Take the plan and, by arm and rank, the streams that exist.

        `sealed`: the values of a snapshot have to fit the norm and extremes recorded with it.
        """
        self.plan = plan
        self._streams = streams
        self._sealed = sealed
        self._index: dict[tuple[str, int], dict[Moment, dict[str, record.Value]]] = {}
        self._places: dict[tuple[str, int], dict[tuple[Moment, str], tuple[int, int]]] = {}
        for arm, by_rank in streams.items():
            for rank, stream in by_rank.items():
                cells: dict[Moment, dict[str, record.Value]] = {}
                places: dict[tuple[Moment, str], tuple[int, int]] = {}
                for row in stream.rows:
                    moment = (row.repeat, row.step, row.phase)
                    cells.setdefault(moment, {}).update(row.metrics)
                    for name, place in row.snapshots.items():
                        places[moment, name] = place
                self._index[arm, rank] = cells
                self._places[arm, rank] = places

    @classmethod
    def read(cls, layout: Layout) -> Tables:
        """Read a run directory.

        Raises:
            RecordError: if the plan or a stream is damaged.
        """
        plan = Plan.read(layout.plan)
        streams: dict[str, dict[int, record.Stream]] = {}
        for arm in plan.arms:
            found = {rank: record.read(layout, arm.name, rank) for rank in range(arm.ranks)}
            streams[arm.name] = {r: stream for r, stream in found.items() if stream is not None}
            for rank, stream in streams[arm.name].items():
                head = stream.header
                if head.run != plan.run_id:
                    raise RecordError(
                        f"{layout.arm(arm.name)} holds records of run {head.run}, "
                        f"the plan is of run {plan.run_id}"
                    )
                says = (head.scenario, head.arm, head.rank, head.world_size)
                if says != (plan.scenario, arm.name, rank, arm.ranks):
                    raise RecordError(
                        f"{layout.stream(arm.name, rank)} was written by rank {head.rank} of "
                        f"{head.world_size} in arm {head.arm} of {head.scenario}; the plan has "
                        f"rank {rank} of {arm.ranks} in arm {arm.name} of {plan.scenario} there"
                    )
        return cls(plan, streams, sealed=True)

    @property
    def root_params(self) -> Mapping[str, Any]:
        """The scenario's parameters as they were run."""
        return self.plan.params

    def stream(self, arm: str, rank: int) -> record.Stream:
        """Return one rank's stream; MissingRecord if it never wrote one."""
        try:
            return self._streams[arm][rank]
        except KeyError:
            raise MissingRecord(f"no records of rank {rank} in arm {arm}") from None

    def ranks(self, arm: str) -> range:
        """Return the ranks that take part in an arm; MissingRecord if it was not planned."""
        try:
            return range(self.plan.arm(arm).ranks)
        except KeyError:
            raise MissingRecord(f"arm {arm} is not part of this run") from None

    def require(self, *arms: str) -> None:
        """Check that every rank of these arms came to its end; MissingRecord names who did not."""
        for arm in arms:
            gone = [r for r in self.ranks(arm) if self.stream(arm, r).end != "completed"]
            if not gone:
                continue
            # A rank that only lost its peer is not the one to name, if there is another.
            gone.sort(key=lambda r: peer_was_lost(self.stream(arm, r).error or ""))
            stream = self.stream(arm, gone[0])
            where = f"after step {stream.rows[-1].step}" if stream.rows else "before its first step"
            why = f": {' '.join(stream.error.split())[:200]}" if stream.error else ""
            raise MissingRecord(f"arm {arm}: rank {gone[0]} ended {where}{why}")

    def moments(self, arm: str, *, rank: int = 0, repeat: int = 0) -> list[tuple[int, str]]:
        """Return (step, phase) in the order in which the rank first reached them."""
        cells = self._cells(arm, rank)
        return [(step, phase) for rep, step, phase in cells if rep == repeat]

    def has(self, arm: str, metric: str, *, rank: int = 0) -> bool:
        """Say whether a rank recorded a metric at all."""
        index = self._index.get((arm, rank), {})
        return any(metric in cells for cells in index.values())

    def value(
        self, arm: str, metric: str, *, step: int, phase: str = "", rank: int = 0, repeat: int = 0
    ) -> Any:
        """Return one recorded value.

        Raises:
            MissingRecord: if the rank did not record it.
        """
        try:
            return self._cells(arm, rank)[repeat, step, phase][metric]
        except KeyError:
            at = f"step {step}" + (f", phase {phase}" if phase else "")
            raise MissingRecord(
                f"arm {arm}: rank {rank} has no {metric} at {at}, repeat {repeat}"
            ) from None

    def series(
        self, arm: str, metric: str, *, phase: str | None = None, rank: int = 0, repeat: int = 0
    ) -> dict[int, Any]:
        """Return step -> value, in the order recorded; with several phases the last one counts.

        Raises:
            MissingRecord: if the rank never recorded the metric.
        """
        found = {
            step: cells[metric]
            for (rep, step, at), cells in self._cells(arm, rank).items()
            if rep == repeat and metric in cells and (phase is None or at == phase)
        }
        if not found:
            raise MissingRecord(f"arm {arm}: rank {rank} never recorded {metric}")
        return found

    def last(
        self, arm: str, metric: str, *, phase: str | None = None, rank: int = 0, repeat: int = 0
    ) -> Any:
        """Return the last recorded value of a metric; MissingRecord if there is none."""
        return list(self.series(arm, metric, phase=phase, rank=rank, repeat=repeat).values())[-1]

    def snapshot(
        self, arm: str, name: str, *, step: int, phase: str = "", rank: int = 0, repeat: int = 0
    ) -> Vector:
        """Return the recorded values of a tensor as a 1-d float64 array.

        Raises:
            MissingRecord: if the rank took no such snapshot.
        """
        places = self._places.get((arm, rank), {})
        try:
            place = places[(repeat, step, phase), name]
        except KeyError:
            at = f"step {step}" + (f", phase {phase}" if phase else "")
            raise MissingRecord(
                f"arm {arm}: rank {rank} has no snapshot of {name} at {at}, repeat {repeat}"
            ) from None
        stream = self.stream(arm, rank)
        values = stream.snapshot(place)
        if self._sealed:
            _check_seal(stream, name, values, self._cells(arm, rank)[repeat, step, phase])
        return values

    def distance(
        self,
        arm: str,
        to: str,
        name: str,
        *,
        step: int,
        phase: str = "",
        rank: int = 0,
        repeat: int = 0,
    ) -> float:
        """Return ||x - y|| / ||y||, x from `arm` (that rank and repeat), y from rank 0 of `to`."""
        x = self.snapshot(arm, name, step=step, phase=phase, rank=rank, repeat=repeat)
        y = self.snapshot(to, name, step=step, phase=phase)
        return relative_l2(x, y)

    def permuted(self, arm: str, name: str, *, step: int, phase: str = "") -> list[float]:
        """Return, for each A/A repeat of an arm, its distance to the unpermuted repeat 0."""
        return [
            self.distance(arm, arm, name, step=step, phase=phase, repeat=repeat)
            for repeat in range(1, self.plan.arm(arm).repeats)
        ]

    def repeats_differ(self, arm: str) -> bool:
        """Say whether any A/A repeat of an arm recorded another tensor than repeat 0 did."""
        cells = self._cells(arm, 0)
        return any(
            value != cells[0, step, phase][name]
            for (repeat, step, phase), metrics in cells.items()
            for name, value in metrics.items()
            if repeat and name.endswith(".digest") and name in cells.get((0, step, phase), {})
        )

    def first_divergence(
        self, arm: str, *, metrics: tuple[str, ...] | None = None, repeat: int = 0
    ) -> Divergence | None:
        """Return the first record in which a rank differs from rank 0, or None if none does.

        Only text metrics (digests, names) are compared unless `metrics` names others.

        Raises:
            MissingRecord: if one rank lacks a record that another has: that is not agreement.
        """
        ranks = self.ranks(arm)
        base = self._cells(arm, 0)

        def compares(name: str) -> bool:
            return name in metrics if metrics else name.endswith(".digest")

        compared = 0
        for moment, cells in base.items():
            if moment[0] != repeat:
                continue
            for name, mine in cells.items():
                if not compares(name):
                    continue
                for other in ranks[1:]:
                    theirs = self.value(
                        arm, name, step=moment[1], phase=moment[2], rank=other, repeat=repeat
                    )
                    compared += 1
                    if theirs != mine and not (theirs != theirs and mine != mine):
                        return Divergence(
                            step=moment[1],
                            phase=moment[2],
                            metric=name,
                            ranks=(0, other),
                            values=(mine, theirs),
                        )
        for other in ranks[1:]:
            for (at, step, phase), cells in self._cells(arm, other).items():
                for name in filter(compares, cells if at == repeat else ()):
                    self.value(arm, name, step=step, phase=phase, repeat=repeat)
        if not compared and len(ranks) > 1:
            raise MissingRecord(f"arm {arm}: nothing recorded that could be compared between ranks")
        return None

    def metrics(self, arm: str) -> list[str]:
        """Return the names of all metrics an arm recorded, in order of first appearance."""
        names: dict[str, None] = {}
        for rank in self._streams.get(arm, {}):
            for cells in self._index[arm, rank].values():
                names.update(dict.fromkeys(cells))
        return list(names)

    def rows(self) -> Iterator[tuple[str, int, record.Row]]:
        """Yield (arm, rank, record) of everything recorded."""
        for arm, by_rank in self._streams.items():
            for rank, stream in by_rank.items():
                for row in stream.rows:
                    yield arm, rank, row

    def _cells(self, arm: str, rank: int) -> dict[Moment, dict[str, record.Value]]:
        self.stream(arm, rank)
        return self._index[arm, rank]


def _check_seal(
    stream: record.Stream, name: str, values: Vector, recorded: Mapping[str, record.Value]
) -> None:
    """Compare the values of a snapshot with what its rank wrote about them into the stream.

    Raises:
        RecordError: if they are not the same values: the two files do not belong together.
    """
    import numpy as np

    if not values.size or recorded.get(f"{name}.nonfinite"):
        return
    with np.errstate(over="ignore", invalid="ignore"):
        found = {"min": values.min(), "max": values.max(), "norm": np.linalg.norm(values)}
    for what, value in found.items():
        said = recorded.get(f"{name}.{what}")
        # The sum behind a norm may run in another order on another machine.
        slack = 1e-9 if what == "norm" else 0.0
        if isinstance(said, float) and not math.isclose(said, float(value), rel_tol=slack):
            raise RecordError(
                f"{stream.tensors} and the stream beside it do not belong together: {name} has "
                f"{what} {float(value):.9g} here and {said:.9g} there"
            )


def relative_l2(x: Vector, y: Vector) -> float:
    """Return ||x - y|| / ||y|| in float64; NaN if anything is not finite.

    Raises:
        MissingRecord: if the two have different sizes.
    """
    import numpy as np

    if x.shape != y.shape:
        raise MissingRecord(f"cannot compare tensors of {x.size} and {y.size} values")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return float("nan")
    norm = float(np.linalg.norm(y))
    gap = float(np.linalg.norm(x - y))
    return gap / norm if norm else (0.0 if gap == 0.0 else float("inf"))
