"""What crosses the process boundary: the plan of one run, as JSON, and every path of that run."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import RecordError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class ArmPlan:
    """How one arm of this run is carried out."""

    name: str
    ranks: int
    repeats: int
    isolated: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a rank needs to know; resolved and validated before any process starts."""

    run_id: str
    scenario: str
    params: Mapping[str, Any]
    arms: tuple[ArmPlan, ...]
    world_size: int
    device: str
    """cpu or cuda: where the tensors of every rank live."""
    backend: str
    """gloo or nccl."""
    seed: int
    engine: str
    """warm or torchrun: how the ranks are started."""
    collective_timeout_s: float
    """After so many seconds a collective without its peers raises in the rank that waits."""
    arm_timeout_s: float
    """After so many seconds without a new record an arm counts as hung and is stopped."""
    schema: int = SCHEMA

    def arm(self, name: str) -> ArmPlan:
        """Return the plan of one arm; KeyError if this run has none of that name."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise KeyError(name)

    def deal(self, arms: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return which processes carry out each of these arms when they share processes.

        Arms of one process are dealt out over all of them, so that they run side by side. The
        position in a tuple is the rank within the arm.
        """
        dealt: dict[str, tuple[int, ...]] = {}
        singles = 0
        for name in arms:
            ranks = self.arm(name).ranks
            if ranks == 1:
                dealt[name] = (singles % self.world_size,)
                singles += 1
            else:
                dealt[name] = tuple(range(ranks))
        return dealt

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back.

        Raises:
            RecordError: if the text is not a plan of this schema.
        """
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise RecordError(
                    f"plan has schema {data['schema']}, this version reads schema {SCHEMA}; "
                    "judge it with the version that wrote it (see environment.json)"
                )
            arms = tuple(ArmPlan(**arm) for arm in data.pop("arms"))
            return cls(arms=arms, **data)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"not a plan: {error!r}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Read `plan.json`.

        Raises:
            RecordError: if the file cannot be read or holds no plan.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise RecordError(f"cannot read plan {path}: {error.strerror}") from error


@dataclass(frozen=True)
class Layout:
    """Every path of one run; nobody else joins file names."""

    root: Path

    @property
    def plan(self) -> Path:
        """The validated plan the ranks read."""
        return self.root / "plan.json"

    @property
    def config(self) -> Path:
        """The resolved configuration as Hydra composed it."""
        return self.root / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, commit, host, command line."""
        return self.root / "environment.json"

    @property
    def verdict(self) -> Path:
        """The findings; what scripts read."""
        return self.root / "verdict.json"

    @property
    def ranks(self) -> Path:
        """How each process of each batch ended, as the engine saw it."""
        return self.root / "ranks.json"

    @property
    def judge_errors(self) -> Path:
        """Tracebacks of judges that raised; absent if none did."""
        return self.root / "judge_errors.txt"

    @property
    def parquet(self) -> Path:
        """All records as one tidy table."""
        return self.root / "records.parquet"

    @property
    def report(self) -> Path:
        """The self-contained page."""
        return self.root / "report.html"

    @property
    def junit(self) -> Path:
        """One test case per claim, for CI systems."""
        return self.root / "junit.xml"

    @property
    def markdown(self) -> Path:
        """The verdict as a table to paste into an issue."""
        return self.root / "verdict.md"

    def tracker(self, name: str) -> Path:
        """Directory of what a tracker keeps on disk."""
        return self.root / name

    def arm(self, arm: str) -> Path:
        """Directory with the records of one arm."""
        return self.root / "records" / arm

    def stream(self, arm: str, rank: int) -> Path:
        """Record stream of one rank of one arm."""
        return self.arm(arm) / f"rank{rank}.jsonl"

    def tensors(self, arm: str, rank: int) -> Path:
        """Raw float64 values of the snapshots that the stream points into."""
        return self.arm(arm) / f"rank{rank}.f64"

    def log(self, batch: int, rank: int) -> Path:
        """What one rank of one batch of arms printed, stdout and stderr."""
        return self.root / "logs" / f"batch{batch}.rank{rank}.log"

    def error(self, batch: int, rank: int) -> Path:
        """Last words of one rank, in the format of torchrun's error files."""
        return self.root / "logs" / f"batch{batch}.rank{rank}.error.json"


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, never half of it.

    Raises:
        RecordError: if the file cannot be written; names the file and why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink()
            raise
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from error
