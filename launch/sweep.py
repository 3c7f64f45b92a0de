"""Many configurations, one table: the points of a multirun, one after another on one warm server.

Each point is a run directory of its own. A point that fails is a row, not the end. A second call
runs only what is missing: a run of the same configuration, scenario source, torch, device and
engine that came to a sound end is taken as it is, whoever started it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from harness.errors import HarnessError, PrerequisiteError, UsageError
from harness.plan import Layout
from harness.plural import number_of
from harness.report import terminal
from harness.verdict import strict
from launch import devices, sweep_tables
from launch.config import Config
from launch.devices import Place
from launch.engine import Engine, Progress
from launch.environment import torch_version
from launch.points import INTERRUPTED, NOT_RUN, Clock, Done, Finished, Point, exit_code, measured
from launch.reproduce import engine_for, point_key, reproduce

LOOKS = ("dry_run", "quiet", "json", "results")
"""Keys that do not change what is swept, only where it goes and what is said about it."""


def run(points: Sequence[Point]) -> int:
    """Run what is missing, write the tables and the page; returns the exit code.

    The code is 130 after Ctrl-C; that of the first point if no point came to a verdict; else the
    gravest of the points': 10 unexpected, then 11 inconclusive, failed or refused, then 0.

    Raises:
        HarnessError: if no point can run, or the tables cannot be written.
    """
    sound = [point.config for point in points if point.config is not None]
    if not sound:
        raise _refusal(points)
    sweep = Sweep(points, sound)
    if sound[0].dry_run:
        return sweep.dry_run()
    return sweep.run()


class Sweep:
    """One command line's points, and what became of them so far."""

    def __init__(self, points: Sequence[Point], sound: Sequence[Config]) -> None:
        """Look at the machine once, since a look costs an import of torch where there is a GPU."""
        self.points = points
        self.first = sound[0]
        self.keys = swept_values([point.overrides for point in points])
        self.swept = list(self.keys[0])
        wanted = any(config.device != "cpu" for config in sound)
        self._devices = devices.cuda_devices() if wanted else 0
        self._torch = torch_version()
        self._finished = Finished()
        self._engines: dict[tuple[str, int], Engine] = {}
        self.out = terminal.console(quiet=self.first.quiet, stderr=self.first.json)
        self.arms = sum(len(config.scenario.arms) for config in sound)

    @property
    def folder(self) -> Path:
        """The directory of the tables: the same keys and values find the same one again."""
        words = sorted(
            sorted(word for word in point.overrides if word.split("=")[0] not in LOOKS)
            for point in self.points
        )
        digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8]
        root = self.first.results.expanduser().absolute()
        return root / "sweeps" / f"{self.first.name}-{digest}"

    def run(self) -> int:
        """Run the points, whatever becomes of each, and write the tables."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PrerequisiteError(
                f"cannot make {self.folder}: {error.strerror}\n"
                "type results=DIR to write somewhere else"
            ) from error
        over = ", ".join(self.swept) or "nothing: no key has two values"
        self.out.print(
            f"sweep of {self.first.name}: {number_of(len(self.points), 'point')} over {over}"
        )
        done: list[Done] = []
        stopped = False
        try:
            with terminal.bar(self.out) as show:
                clock = Clock(self.arms)
                for number, point in enumerate(self.points, 1):
                    name = f"point {number} of {len(self.points)}: {self.name(number)}"

                    def changed(progress: Progress, name: str = name) -> None:
                        words = f"{name}, {progress.arm}{clock.left(progress.done)}"
                        show(clock.through + progress.done, self.arms, words)

                    clock.start()
                    done.append(self._point(number, point, changed))
                    arms = len(point.config.scenario.arms) if point.config else 0
                    clock.end(arms, counts=not done[-1].reused)
                    show(clock.through, self.arms, name)
                    self._say(self._line(done[-1]))
        except KeyboardInterrupt:
            stopped = True
        finally:
            for engine in self._engines.values():
                engine.close()
        left = range(len(done) + 1, len(self.points) + 1)
        states = [INTERRUPTED, *[NOT_RUN] * len(left)]
        done += [Done(number=n, state=state) for n, state in zip(left, states, strict=False)]
        return self._conclude(done, stopped=stopped)

    def dry_run(self) -> int:
        """Print the points, and which of them exist already; start and write nothing."""
        told = []
        for number, point in enumerate(self.points, 1):
            run = problem = None
            if point.config is None:
                problem = f"refused: {point.error}"
            else:
                try:
                    found = self._existing(point.config)
                    run = str(found.root) if found else None
                except HarnessError as error:
                    problem = f"cannot run: {error}"
            told.append({"point": number, **self.keys[number - 1], "run": run, "problem": problem})
            what = (problem or f"exists   {run}") if problem or run else "to run"
            self._say(f"{number:>4}  {self.name(number)}  {what}")
        there = sum(item["run"] is not None for item in told)
        bad = sum(item["problem"] is not None for item in told)
        left = len(told) - there - bad
        self._say(
            f"{number_of(len(told), 'point')}: {there} exist, {left} to run, {bad} cannot run"
        )
        self._say(f"table    {self.folder / 'table.csv'}", style="dim")
        if self.first.json:
            print(json.dumps(strict(told), allow_nan=False))
        return 11 if bad else 0

    def name(self, number: int) -> str:
        """Return the values of one point in words."""
        return " ".join(f"{key}={value}" for key, value in self.keys[number - 1].items())

    def _place(self, config: Config) -> Place:
        return devices.choose(config.gpus, config.device, self._devices)

    def _engine(self, config: Config) -> Engine:
        return self._engines.setdefault((config.engine, config.port), engine_for(config))

    def _existing(self, config: Config) -> Layout | None:
        key = point_key(config, self._place(config), self._torch)
        folder = config.results.expanduser().absolute() / config.name
        return self._finished.find(folder, key, self._engine(config).name)

    def _point(self, number: int, point: Point, changed: Callable[[Progress], None]) -> Done:
        """Run one point, or take the run that is there; never raises but for Ctrl-C."""
        if point.config is None:
            error = point.error or UsageError("refused")
            return Done(
                number=number, state="refused", problem=str(error), exit_code=error.exit_code
            )
        config = point.config
        born = time.monotonic()
        try:
            found = self._existing(config)
            if found:
                # A run whose files were damaged since counts as missing.
                with contextlib.suppress(HarnessError):
                    return measured(number, config, found, reused=True)
            where = self._place(config)
            result = reproduce(
                config, self._engine(config), where, started=lambda plan: None, changed=changed
            )
            seconds = round(time.monotonic() - born, 3)
            return measured(number, config, result.layout, seconds=seconds)
        except HarnessError as error:
            return Done(
                number=number, state="failed", problem=str(error), exit_code=error.exit_code
            )
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            return Done(number=number, state="failed", problem=problem, exit_code=1)

    def _line(self, done: Done) -> str:
        took = "as it was" if done.reused else f"{done.seconds:.1f} s" if done.seconds else ""
        words = [f"{done.number:>4}  {self.name(done.number)}", done.state.replace("_", " "), took]
        problem = " ".join((done.problem or "").split())
        return "  ".join(word for word in [*words, problem[:300]] if word)

    def _conclude(self, done: Sequence[Done], *, stopped: bool) -> int:
        folder = self.folder
        keys = sweep_tables.key_columns(self.keys)
        values = [{key: _cell(row[key], kind) for key, kind in keys.items()} for row in self.keys]
        points = [item.about() | values[item.number - 1] for item in done]
        pairs = list(zip(points, done, strict=True))
        arms = [{**about, **row} for about, item in pairs for row in item.rows]
        findings = [{**about, **row} for about, item in pairs for row in item.findings]
        sweep_tables.write(folder, "table", sweep_tables.arms(keys), arms)
        sweep_tables.write(folder, "findings", sweep_tables.findings(keys), findings)
        self._page(folder, points, arms, findings)
        terminal.sweep(self.out, self.swept, points, arms, findings)
        counts = {
            "run": sum(item.seconds is not None and item.state != "failed" for item in done),
            "as they were": sum(item.reused for item in done),
            "failed": sum(item.state == "failed" for item in done),
            "refused": sum(item.state == "refused" for item in done),
            "not run": sum(item.state in (INTERRUPTED, NOT_RUN) for item in done),
        }
        told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        self.out.print(f"{number_of(len(done), 'point')}: {told}")
        if stopped:
            self.out.print("interrupted: the same command runs what is left", style="bold yellow")
        self._say(f"table    {folder / 'table.csv'}", style="dim")
        self._say(f"page     {folder / 'sweep.html'}", style="dim")
        if self.first.json:
            rows = {"points": points, "arms": arms, "findings": findings}
            print(json.dumps(strict(rows), allow_nan=False))
        elif self.first.quiet:
            print(folder / "table.csv")
        return 130 if stopped else exit_code(done)

    def _page(
        self,
        folder: Path,
        points: Sequence[Mapping[str, Any]],
        arms: Sequence[Mapping[str, Any]],
        findings: Sequence[Mapping[str, Any]],
    ) -> None:
        """Write the page; what goes wrong here is said and loses no table."""
        try:
            from harness.report import sweep as page

            page.write(
                folder / "sweep.html",
                page.Page(
                    name=self.first.name,
                    title=self.first.scenario.title,
                    claims=self._claims(),
                    swept=self.swept,
                    points=points,
                    arms=arms,
                    findings=findings,
                ),
            )
        except Exception as error:
            self._say(f"note     sweep.html not written: {type(error).__name__}: {error}")

    def _claims(self) -> dict[str, str]:
        found = [point.config.scenario for point in self.points if point.config]
        return {claim.name: claim.text for scenario in found for claim in scenario.claims}

    def _say(self, text: str, *, style: str | None = None) -> None:
        self.out.print(text, markup=False, style=style, soft_wrap=True)


def _cell(value: Any, kind: type) -> Any:
    if kind is not str:
        return kind(value)
    return value if isinstance(value, str) else json.dumps(value)


def swept_values(overrides: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return, for each point, the value of every key that differs between points, as typed."""
    typed = [dict(_parsed(word) for word in words) for words in overrides]
    keys = dict.fromkeys(key for values in typed for key in values)
    swept = [key for key in keys if len({json.dumps(v.get(key)) for v in typed}) > 1]
    return [{key: values.get(key) for key in swept} for values in typed]


@functools.cache
def _parsed(word: str) -> tuple[str, Any]:
    override = OverridesParser.create().parse_override(word)
    return override.key_or_group, _plain(override.value())


def _plain(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _refusal(points: Sequence[Point]) -> HarnessError:
    """Return one error that says what was wrong with each point, or the only one there is."""
    errors = [point.error for point in points if point.error is not None]
    distinct = list(dict.fromkeys(str(error) for error in errors))
    if len(distinct) <= 1:
        return errors[0] if errors else UsageError("nothing to sweep")
    return UsageError("no point of this sweep can run\n" + "\n".join(distinct))
