"""The command line behind `make repro` and `make sweep`: compose, then run what was composed."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from harness.errors import HarnessError, UsageError
from harness.pipes import print_nowhere
from harness.plan import Layout, Plan
from harness.report import terminal
from launch import arguments as words
from launch import config as configuration
from launch.config import Config
from launch.engine import Engine, Progress
from launch.points import Point
from launch.reproduce import Result, engine_for, make_plan, place, reproduce
from launch.torchrun import command as torchrun_command
from launch.torchrun import shown


def run(arguments: Sequence[str]) -> int:
    """Compose, run, report; returns the exit code."""
    points: list[Point] = []
    bugs: list[Exception] = []

    def take(cfg: DictConfig) -> None:
        # Unresolved: an interpolation in an override would be looked up where it stands.
        composed: Any = HydraConfig.instance().cfg
        task: Any = OmegaConf.to_container(composed.hydra.overrides.task)
        overrides = tuple(task)
        try:
            config = configuration.read(cfg, typed.problems)
            points.append(Point(overrides=overrides, config=config))
        except HarnessError as error:
            points.append(Point(overrides=overrides, config=None, error=error))
        except Exception as error:
            # Hydra would print a part of the traceback and end as if the user had mistyped.
            bugs.append(error)

    try:
        typed = words.check(arguments)
        flags, _ = words.split(arguments)
        if typed.problems and flags:
            raise UsageError("\n".join(typed.problems))
        code = compose(typed.sound, take)
        if bugs:
            raise bugs[0]
        if typed.problems and not points:
            raise UsageError("\n".join(typed.problems))
        if code or not points:
            return code
        if {"-m", "--multirun"} & set(flags):
            from launch import sweep

            return sweep.run(points)
        if points[0].error is not None:
            raise points[0].error
        assert points[0].config is not None
        return _one(points[0].config)
    except HarnessError as error:
        print(f"crossrank: {error}", file=sys.stderr)
        return error.exit_code


def compose(arguments: Sequence[str], take: Callable[[DictConfig], None]) -> int:
    """Let Hydra compose, calling `take` once per configuration; returns 0, or 2 if it refused."""
    folders = words.conf_folders()[1:]
    search = [f"hydra.searchpath=[{','.join(f'file://{path}' for path in folders)}]"]
    before = sys.argv
    flags, overrides = words.split(arguments)
    # The default; Hydra has no way to say it.
    overrides = [word for word in overrides if word != "sweep=null"]
    # Hydra writes a file about the sweep while it composes; the run directories say all of it.
    spare = tempfile.TemporaryDirectory(prefix="crossrank.")
    search = [f"hydra.sweep.dir={spare.name}", *(search if folders else [])]
    # Hydra's parser wants all overrides in one row.
    sys.argv = [sys.argv[0], *flags, *overrides, *search]
    try:
        hydra.main(version_base="1.3", config_path=str(words.CONF), config_name="config")(take)()
    except SystemExit as error:
        # Hydra ends with 1 for a command line it cannot read, as Python does for a crash.
        return 2 if error.code == 1 else int(error.code or 0)
    finally:
        sys.argv = before
        spare.cleanup()
    return 0


def _one(config: Config) -> int:
    engine = engine_for(config)
    if config.dry_run:
        return dry_run(config, engine.name)
    out = terminal.console(quiet=config.quiet, stderr=config.json)
    try:
        result = execute(config, engine)
    finally:
        engine.close()
    with printing():
        terminal.verdict(out, config.scenario, result.verdict)
        for note in result.notes:
            out.print(f"note     {note}", markup=False, soft_wrap=True)
        terminal.paths(out, result.layout)
        if result.verdict.failures:
            logs = result.layout.log(0, 0).parent
            out.print(f"logs     {logs}", style="dim", markup=False, soft_wrap=True)
        if result.verdict.judge_errors:
            out.print(f"trace    {result.layout.judge_errors}", markup=False, soft_wrap=True)
        if config.json:
            print(result.layout.verdict.read_text(encoding="utf-8"), end="")
        elif config.quiet:
            print(result.layout.verdict)
        sys.stdout.flush()
    return result.verdict.conclusion.exit_code


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Let no reader who went away, and no full disk behind the output, cost a run its verdict."""
    try:
        yield
    except BrokenPipeError:
        print_nowhere(sys.stdout)
    except OSError as error:
        print_nowhere(sys.stdout)
        with contextlib.suppress(OSError):
            print(f"crossrank: cannot print: {error.strerror}", file=sys.stderr)


def execute(config: Config, engine: Engine) -> Result:
    """Run one configuration with header and progress bar.

    Raises:
        HarnessError: if it cannot start or its directory cannot be written.
    """
    out = terminal.console(quiet=config.quiet, stderr=config.json)
    where = place(config)
    with terminal.bar(out) as show:

        def started(plan: Plan) -> None:
            with printing():
                terminal.header(out, config.scenario, plan, where.notice)
                if engine.name == "torchrun":
                    root = config.results.expanduser().absolute() / config.name / plan.run_id
                    hand = shown(by_hand(config, plan, Layout(root)))
                    out.print(hand, markup=False, soft_wrap=True)

        def changed(progress: Progress) -> None:
            show(progress.done, progress.total, progress.arm)

        return reproduce(config, engine, where, started=started, changed=changed)


def by_hand(config: Config, plan: Plan, layout: Layout) -> list[str]:
    """Return the torchrun command for the arms that share their processes."""
    shared = [arm.name for arm in plan.arms if not arm.isolated]
    arms = shared or [arm.name for arm in plan.arms]
    return torchrun_command(plan, layout, arms, 0, port=config.port)


def dry_run(config: Config, engine: str) -> int:
    """Print what would run, arm by arm, and the torchrun command; start nothing."""
    out = terminal.console(stderr=config.json)
    where = place(config)
    plan = make_plan(config, where, engine, "DRY-RUN")
    terminal.header(out, config.scenario, plan, where.notice)
    terminal.arms(out, config.scenario, plan)
    layout = Layout(Path(config.results) / config.name / "RUN")
    out.print("by hand, once a run has written its plan.json (RUN: its folder, DIR: a new one):")
    hand = [*by_hand(config, plan, layout), "--out", "DIR"]
    out.print(shown(hand), markup=False, soft_wrap=True)
    if config.json:
        print(json.dumps(json.loads(plan.to_json()), indent=2))
    return 0
