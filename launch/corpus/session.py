"""One sitting of a corpus: what is asked for, what is there, and what became of each case."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.causes.cause import listed
from harness.errors import HarnessError, PrerequisiteError
from harness.plan import Layout
from harness.plural import number_of
from harness.report import terminal
from launch import environment
from launch.corpus import table
from launch.corpus.cases import Case, cases
from launch.corpus.pool import Pool, Stoppable, Stopped, budget
from launch.corpus.record import (
    INTERRUPTED,
    NOT_RUN,
    Corpus,
    Entry,
    Paths,
    entry,
    new_folder,
    replaced,
)
from launch.devices import Place
from launch.ending import INTERRUPTED as INTERRUPTED_CODE
from launch.runs import read_json

SAVE_S = 2.0
"""So often corpus.json is written while runs come to their end."""
ASKED = ("gpus", "scenarios", "family", "seed", "device", "launch")
"""Keys that say what a corpus is; one that is continued has them already."""


class Session:
    """What was typed, the cases it means, and their entries so far."""

    def __init__(self, typed: Mapping[str, Any], folder: Path | None) -> None:
        """Compose everything; the server imports torch meanwhile.

        Raises:
            HarnessError: if nothing can be run.
        """
        from launch.warm import Warm, usable

        self.typed = typed
        self.out = terminal.console(quiet=typed["quiet"], stderr=typed["json"])
        self.born = time.monotonic()
        starts = not typed["dry_run"]
        if starts and typed["launch"] != "torchrun" and usable():
            Warm.heat()
        before = Corpus.read(folder) if folder else None
        # A directory is made only when it is known that something can run.
        self.cases = self._compose(folder or typed["results"])
        self._folder = folder
        self.spent = before.seconds if before else 0.0
        old = {item.key: item for item in before.entries} if before else {}
        self.entries: tuple[Entry, ...] = tuple(
            old[key] if (key := _key(case)) in old and _stands(case, old[key], folder) else blank
            for case, blank in zip(self.cases, map(_blank, self.cases), strict=True)
        )
        self.environment: Mapping[str, Any] = before.environment if before else {}
        self._saved, self._unsaved = 0.0, False

    def _compose(self, results: Path) -> list[Case]:
        typed = self.typed
        found = cases(
            typed["scenarios"],
            typed["family"],
            typed["gpus"],
            seed=typed["seed"],
            device=typed["device"],
            launch=typed["launch"],
            results=results,
        )
        if not any(case.config for case in found):
            told = dict.fromkeys(f"{case.name}: {case.problem}" for case in found)
            raise PrerequisiteError("nothing to run\n" + "\n".join(told))
        return found

    @property
    def left(self) -> list[Case]:
        """Cases that can run and are not through."""
        through = {item.key for item in self.entries if item.through}
        return [case for case in self.cases if case.config and _key(case) not in through]

    def dry_run(self) -> int:
        """Say what would run; start and write nothing."""
        table.plan(self.out, self.cases, {_key(case) for case in self.left})
        return 0

    def run(self) -> int:
        """Run what is left, whatever becomes of each, and write the reports."""
        from launch.reproduce import engine_for

        folder = self._folder or new_folder(self.typed["results"])
        self._folder = folder
        self.cases = self._compose(folder)
        left = self.left
        places = [case.place for case in left if case.place]
        place = next((p for p in places if p.device == "cuda"), places[0] if places else None)
        if place:
            self.environment = gathered(self.environment, place)
        pool = Pool(ranks=self.typed["ranks"] or budget(place.device if place else "cpu"))
        self._header(left, pool.ranks)
        self._save(folder, now=True)
        stopped = False
        if left:
            assert left[0].config is not None
            engine = Stoppable(engine_for(left[0].config), pool.stop)
            try:
                self._work(pool, engine, left, folder)
            except KeyboardInterrupt:
                stopped = True
            finally:
                engine.close()
        return self._conclude(folder, stopped=stopped)

    def _header(self, left: Sequence[Case], ranks: int) -> None:
        sizes = ", ".join(map(str, self.typed["gpus"]))
        there = sum(item.through and item.run is not None for item in self.entries)
        reused = f", {there} are there" if there else ""
        places = {(case.place.device, case.place.backend) for case in left if case.place}
        on = "".join(f", {backend} on {device}" for device, backend in sorted(places))
        told = f"{number_of(len(left), 'run')} at gpus={sizes}{on}{reused}; up to "
        told += f"{number_of(ranks, 'rank')} at a time"
        self.out.print(f"corpus   {told}", markup=False, soft_wrap=True)

    def _work(self, pool: Pool, engine: Stoppable, left: Sequence[Case], folder: Path) -> None:
        total = len(left)
        begun = time.monotonic()
        through = 0

        def work(case: Case) -> Entry:
            return _carry_out(case, engine, folder)

        with terminal.bar(self.out) as show:

            def tick() -> None:
                # What is through is not to wait for the next one, which may hang for long.
                self._save(folder, now=False)
                names = listed([f"{case.name} {case.gpus}" for case in pool.under_way])
                spent = time.monotonic() - begun
                rest = spent / through * (total - through) if through else 0.0
                show(through, total, f"{_left(rest)}{names}")

            def done(case: Case, ended: Entry) -> None:
                nonlocal through
                through += 1
                broken = ended.state not in ("as_expected", "unexpected")
                if pool.stop.is_set() and broken:
                    ended = _blank(case, state=INTERRUPTED, problem=ended.problem, run=ended.run)
                self.entries = replaced(self.entries, ended)
                self._unsaved = True
                table.line(self.out, through, total, ended)
                tick()

            pool.run(left, work, done, tick)

    def _record(self) -> Corpus:
        folder = self._folder
        assert folder is not None
        return Corpus(
            id=folder.name,
            asked={key: self.typed[key] for key in ASKED},
            environment=self.environment,
            entries=self.entries,
            seconds=round(self.spent + time.monotonic() - self.born, 3),
        )

    def _save(self, folder: Path, *, now: bool) -> None:
        if now or (self._unsaved and time.monotonic() - self._saved > SAVE_S):
            self._record().write(folder)
            self._saved, self._unsaved = time.monotonic(), False

    def _conclude(self, folder: Path, *, stopped: bool) -> int:
        self._save(folder, now=True)
        record = self._record()
        paths = Paths(folder)
        notes = _reports(record, paths)
        table.table(self.out, record)
        for note in notes:
            self.out.print(f"note     {note}", markup=False, soft_wrap=True)
        if stopped:
            where = self.typed["results"]
            there = "" if str(where) == "results" else f" results={where}"
            told = f"interrupted: make corpus continue={folder.name}{there} runs what is left"
            self.out.print(told, style="bold yellow", markup=False, soft_wrap=True)
        for what, path in (("page", paths.page), ("json", paths.json), ("junit", paths.junit)):
            self.out.print(f"{what:8} {path}", style="dim", markup=False, soft_wrap=True)
        if self.typed["json"]:
            print(paths.json.read_text(encoding="utf-8"), end="")
        elif self.typed["quiet"]:
            print(paths.json)
        return INTERRUPTED_CODE if stopped else exit_code(record.entries)


def gathered(before: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return the environment of a sitting, with the time at which the corpus was begun.

    Nothing of an earlier sitting stands that was made with another torch or source.
    """
    now = environment.gather(place)
    return now | {"started": before.get("started", now["started"])}


def exit_code(entries: Sequence[Entry]) -> int:
    """Return the gravest: 10 unexpected, 11 undecided, failed or not run, 0 as expected."""
    states = {item.state for item in entries}
    if "unexpected" in states:
        return 10
    return 11 if states - {"as_expected", "skipped"} else 0


def _stands(case: Case, old: Entry, folder: Path | None) -> bool:
    """Say whether an entry need not be made again: it is sound, and nothing it rests on changed."""
    from launch.reproduce import point_key

    if not old.through or old.run is None or case.config is None or case.place is None:
        return False
    assert folder is not None
    try:
        stored = read_json(Layout(folder / old.run).environment).get("point")
    except HarnessError:
        return False
    return bool(stored == point_key(case.config, case.place, environment.torch_version()))


def _key(case: Case) -> tuple[str, int]:
    return case.name, case.gpus


def _blank(
    case: Case, *, state: str = "", problem: str | None = None, run: str | None = None
) -> Entry:
    """Return the entry of a case that has not been run."""
    scenario, place = case.scenario, case.place
    return Entry(
        scenario=case.name,
        gpus=case.gpus,
        title=scenario.title if scenario else "",
        family=scenario.family if scenario else "",
        cause=scenario.cause if scenario else "",
        device=place.device if place else "",
        backend=place.backend if place else "",
        state=state or case.state or NOT_RUN,
        problem=problem or case.problem or None,
        run=run,
    )


def _carry_out(case: Case, engine: Stoppable, folder: Path) -> Entry:
    """Run one case; never raises."""
    from launch.reproduce import reproduce

    assert case.config is not None
    assert case.place is not None
    assert case.scenario is not None
    born = time.monotonic()
    try:
        result = reproduce(
            case.config,
            engine,
            case.place,
            started=lambda plan: None,
            changed=lambda progress: None,
        )
        seconds = round(time.monotonic() - born, 3)
        return entry(_blank(case), result.layout, case.scenario, folder, seconds)
    except Stopped as error:
        return _blank(case, state=INTERRUPTED, problem=str(error))
    except HarnessError as error:
        return _blank(case, state="failed", problem=str(error))
    except Exception as error:
        return _blank(case, state="failed", problem=f"{type(error).__name__}: {error}")


def _reports(record: Corpus, paths: Paths) -> list[str]:
    """Write page and JUnit; returns a note for each that failed: neither can lose the findings."""
    from harness.report import corpus as page
    from launch.corpus import reports

    notes = []
    jobs: dict[Path, Callable[[], None]] = {
        paths.page: lambda: page.write(paths.page, reports.page(record, paths.folder)),
        paths.junit: lambda: reports.junit(record, paths),
    }
    for path, job in jobs.items():
        try:
            job()
        except Exception as error:
            notes.append(f"{path.name} not written: {type(error).__name__}: {error}")
    return notes


def _left(seconds: float) -> str:
    if not seconds:
        return ""
    return f"{seconds:.0f} s left, " if seconds < 90 else f"{seconds / 60:.0f} min left, "
