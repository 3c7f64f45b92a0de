"""What a run of the corpus leaves: one entry a case, kept in `corpus.json`, which is compared."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import MissingRecord, PrerequisiteError, RecordError, UsageError
from harness.plan import Layout, write_text
from harness.scenario import Finding, Outcome, Role, Scenario
from harness.tables import Tables
from harness.verdict import Conclusion, Verdict, strict
from launch.newest import CORPUS
from launch.runs import read_json, stamp

SCHEMA = 1
NOT_RUN = "not_run"
INTERRUPTED = "interrupted"
STATE = ("weights.digest", "body.digest", "head.digest", "dense.digest")
"""What replicas of a model have in common under data parallelism, as scenarios name it."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What became of one scenario at one number of ranks."""

    scenario: str
    gpus: int
    title: str = ""
    family: str = ""
    cause: str = ""
    device: str = ""
    backend: str = ""
    state: str = NOT_RUN
    """as_expected, unexpected, inconclusive, failed, skipped, interrupted or not_run."""
    seconds: float | None = None
    run: str | None = None
    """The run directory, seen from the corpus's own."""
    problem: str | None = None
    headline: str = ""
    ranks_differ: bool | None = None
    """Whether weights part between the ranks of a faulty arm; None where nobody recorded them."""
    findings: Sequence[Mapping[str, Any]] = ()
    """As in verdict.json."""

    @property
    def key(self) -> tuple[str, int]:
        """What it is compared by."""
        return self.scenario, self.gpus

    @property
    def through(self) -> bool:
        """True if it need not be run again when the corpus is continued."""
        return self.state in ("as_expected", "unexpected", "skipped")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """One run of the whole corpus, or of a part."""

    id: str
    asked: Mapping[str, Any]
    """What was typed, with defaults filled in: what it takes to continue it."""
    environment: Mapping[str, Any]
    entries: Sequence[Entry]
    seconds: float = 0.0
    """Of wall time, all sittings together."""
    schema: int = SCHEMA

    def write(self, folder: Path) -> None:
        """Write `corpus.json`.

        Raises:
            RecordError: if it cannot be written.
        """
        text = json.dumps(strict(dataclasses.asdict(self)), indent=1, allow_nan=False)
        write_text(Paths(folder).json, text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Corpus:
        """Read `corpus.json`.

        Raises:
            RecordError: if it cannot be read or is of another version.
        """
        data = read_json(Paths(folder).json)
        try:
            if data["schema"] != SCHEMA:
                raise RecordError(
                    f"{folder} has schema {data['schema']}, this version reads schema {SCHEMA}"
                )
            entries = tuple(Entry(**entry) for entry in data.pop("entries"))
            return cls(entries=entries, **data)
        except (KeyError, TypeError) as error:
            raise RecordError(f"{Paths(folder).json} is no corpus: {error!r}") from error


@dataclass(frozen=True)
class Paths:
    """Every path of a corpus."""

    folder: Path

    @property
    def json(self) -> Path:
        """All findings, for the next corpus to be compared with."""
        return self.folder / "corpus.json"

    @property
    def page(self) -> Path:
        """The index with filters, which opens offline."""
        return self.folder / "index.html"

    @property
    def junit(self) -> Path:
        """One test case a claim."""
        return self.folder / "junit.xml"


def new_folder(results: Path) -> Path:
    """Make a dated directory that nobody else has.

    Raises:
        PrerequisiteError: if it cannot be made.
    """
    root = results.expanduser().absolute() / CORPUS
    now = stamp()
    for number in range(1, 100):
        folder = root / (now if number == 1 else f"{now}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise PrerequisiteError(
                f"cannot make {folder}: {error.strerror}\ntype results=DIR to write somewhere else"
            ) from error
        return folder
    raise PrerequisiteError(f"cannot make a directory for the corpus in {root}")


def folders(results: Path) -> list[Path]:
    """Return the directories of all corpora, the newest last."""
    root = results.expanduser().absolute() / CORPUS
    return sorted(path.parent for path in root.glob("*/corpus.json"))


def find(typed: str, results: Path) -> Path:
    """Return the directory that `latest`, `previous`, a date or a path means.

    Raises:
        UsageError: if there is none; names those there are.
    """
    there = folders(results)
    back = {"latest": 1, "previous": 2}.get(typed)
    if back is not None and len(there) >= back:
        return there[-back]
    for path in (Path(typed).expanduser(), results / CORPUS / typed):
        if back is None and Paths(path).json.exists():
            return path.absolute()
    if back is None and Path(typed).expanduser().is_dir():
        raise UsageError(f"{typed} is no corpus: it holds no {Paths(Path(typed)).json.name}")
    newest = ", ".join(path.name for path in there[-3:])
    raise UsageError(
        f"no corpus {typed!r} in {results / CORPUS}"
        + (f"; the newest are {newest}" if there else "")
        + "\ntype make corpus gpus=4 to run one"
    )


def verdict_of(layout: Layout) -> Verdict:
    """Return the verdict of a run from its verdict.json.

    Raises:
        RecordError: if it cannot be read.
    """
    data = read_json(layout.verdict)
    try:
        findings = {
            item["claim"]: Finding(
                outcome=Outcome(item["outcome"]),
                reason=item["reason"],
                effect=_number(item["effect"]),
                floor=_number(item["floor"]),
                unit=item["unit"],
                evidence=item["evidence"],
            )
            for item in data["findings"]
        }
        return Verdict(
            run_id=data["run_id"],
            scenario=data["scenario"],
            conclusion=Conclusion(data["conclusion"]),
            headline=data["headline"],
            findings=findings,
            failures=tuple(data["failures"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{layout.verdict} is no verdict: {error!r}") from error


def entry(
    about: Entry, layout: Layout, scenario: Scenario, folder: Path, seconds: float | None
) -> Entry:
    """Return the entry of a run that has ended.

    Raises:
        RecordError: if its verdict cannot be read.
    """
    verdict = read_json(layout.verdict)
    keep = ("claim", "kind", "expects", "outcome", "effect", "floor", "multiple", "unit", "reason")
    failures = [str(failure) for failure in verdict["failures"]]
    return dataclasses.replace(
        about,
        state="failed" if failures else str(verdict["conclusion"]),
        seconds=seconds,
        run=Path(os.path.relpath(layout.root, folder)).as_posix(),
        problem="\n".join(failures) or None,
        headline=str(verdict["headline"]),
        ranks_differ=ranks_differ(layout, scenario),
        findings=tuple({name: item.get(name) for name in keep} for item in verdict["findings"]),
    )


def ranks_differ(layout: Layout, scenario: Scenario) -> bool | None:
    """Say whether the ranks of some faulty arm end with other weights; None if nobody knows."""
    try:
        tables = Tables.read(layout)
    except RecordError:
        return None
    known = [
        parted
        for arm in scenario.arms
        if arm.role is Role.FAULTY
        for parted in _parted(tables, arm.name)
    ]
    return any(known) if known else None


def _parted(tables: Tables, arm: str) -> Iterator[bool]:
    try:
        if len(tables.ranks(arm)) > 1:
            yield tables.first_divergence(arm, metrics=STATE) is not None
    except MissingRecord:
        return


def _number(value: Any) -> float | None:
    # The verdict is strict JSON: what is not finite stands there as text.
    return None if value is None else float(value)


def replaced(entries: Sequence[Entry], one: Entry) -> tuple[Entry, ...]:
    """Return the entries with that of the same case replaced."""
    return tuple(one if item.key == one.key else item for item in entries)
