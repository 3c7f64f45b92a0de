"""One run from configuration to verdict: plan, ranks, records, judge, reports."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import scenarios
from harness.errors import HarnessError, PrerequisiteError, RecordError
from harness.plan import ArmPlan, Layout, Plan, write_text
from harness.scenario import Scenario
from harness.tables import Tables
from harness.verdict import Conclusion, Verdict, decide, strict
from launch import environment
from launch.autopsy import failures
from launch.config import Config
from launch.devices import Place, choose, cuda_devices
from launch.engine import Engine, Progress, carry_out
from launch.runs import stamp
from launch.torchrun import Torchrun
from launch.warm import Warm, usable


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run left behind."""

    verdict: Verdict
    layout: Layout
    tables: Tables | None
    notes: tuple[str, ...]
    """What did not work beside the verdict: a tracker, the page, the Parquet file."""


def place(config: Config) -> Place:
    """Decide where the ranks of a run live.

    Raises:
        PrerequisiteError: if the machine lacks what was asked for.
    """
    available = cuda_devices() if config.device != "cpu" else 0
    return choose(config.gpus, config.device, available)


def engine_for(config: Config) -> Engine:
    """Return the engine of a run; `auto` is warm wherever that is sound.

    Raises:
        PrerequisiteError: if the warm engine was asked for where it cannot work.
    """
    if config.engine == "warm" and not usable():
        raise PrerequisiteError("launch=warm needs Linux: type launch=torchrun")
    if config.engine == "torchrun" or not usable():
        return Torchrun(port=config.port)
    return Warm(port=config.port)


def make_plan(config: Config, where: Place, engine: str, run_id: str) -> Plan:
    """Return the plan of a run; pure."""
    arms = []
    for arm in config.scenario.arms:
        repeats = arm.repeats
        if isinstance(repeats, str):
            repeats = 1 + int(config.params[repeats])
        ranks = config.gpus if arm.ranks is None else min(arm.ranks, config.gpus)
        arms.append(ArmPlan(name=arm.name, ranks=ranks, repeats=repeats, isolated=arm.isolated))
    return Plan(
        run_id=run_id,
        scenario=config.name,
        params=config.params,
        arms=tuple(arms),
        world_size=config.gpus,
        device=where.device,
        backend=where.backend,
        seed=config.seed,
        engine=engine,
        collective_timeout_s=config.collective_timeout_s,
        arm_timeout_s=config.arm_timeout_s,
    )


def new_run(results: Path, scenario: str) -> Layout:
    """Make a run directory that nobody else has, named by time and a few random digits.

    Raises:
        PrerequisiteError: if it cannot be made; names the directory and why.
    """
    folder = results.expanduser().absolute() / scenario
    while True:
        root = folder / f"{stamp()}-{os.urandom(3).hex()}"
        try:
            root.mkdir(parents=True, exist_ok=False)
        except FileExistsError as error:
            if not folder.is_dir():
                raise PrerequisiteError(
                    f"cannot make a run directory in {folder}: {error.strerror}\n"
                    "type results=DIR to write somewhere else"
                ) from error
        except OSError as error:
            raise PrerequisiteError(
                f"cannot make a run directory in {folder}: {error.strerror}\n"
                "type results=DIR to write somewhere else"
            ) from error
        else:
            return Layout(root)


def reproduce(
    config: Config,
    engine: Engine,
    where: Place,
    *,
    started: Callable[[Plan], None],
    changed: Callable[[Progress], None],
) -> Result:
    """Run a scenario and judge it. Whatever happens after the start, a verdict.json is written.

    Raises:
        HarnessError: if the run could not start or its directory cannot be written.
        KeyboardInterrupt: after an inconclusive verdict.json was written.
    """
    layout = new_run(config.results, config.name)
    plan = make_plan(config, where, engine.name, layout.root.name)
    write_text(layout.plan, plan.to_json())
    write_text(layout.config, config.text)
    facts = environment.gather(where)
    facts["point"] = point_key(config, where, facts["packages"]["torch"])
    write_text(layout.environment, json.dumps(strict(facts), indent=2) + "\n")
    started(plan)
    wrong: list[str] = []
    try:
        batches = carry_out(plan, layout, engine, Progress(total=len(plan.arms), changed=changed))
        wrong = failures(batches)
    except KeyboardInterrupt:
        # An impatient second Ctrl-C must not cost the verdict.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        conclude(config, layout, ["interrupted before all arms were through"], facts)
        raise KeyboardInterrupt(f"what was recorded is judged in {layout.verdict}") from None
    except HarnessError as error:
        conclude(config, layout, [str(error)], facts)
        raise
    except Exception as error:
        conclude(config, layout, [f"the launcher raised {type(error).__name__}: {error}"], facts)
        raise
    return conclude(config, layout, wrong, facts)


def conclude(config: Config, layout: Layout, wrong: list[str], facts: Mapping[str, Any]) -> Result:
    """Judge what was recorded and write everything that is made from it."""
    tables: Tables | None = None
    try:
        tables = Tables.read(layout)
        verdict = decide(config.scenario, config.name, tables, wrong)
    except RecordError as error:
        verdict = Verdict(
            run_id=layout.root.name,
            scenario=config.name,
            conclusion=Conclusion.INCONCLUSIVE,
            headline="The records of this run cannot be read.",
            findings={},
            failures=(*wrong, str(error)),
        )
    write_text(layout.verdict, verdict.to_json(config.scenario))
    if verdict.judge_errors:
        write_text(
            layout.judge_errors,
            "\n".join(f"claim {name}\n{text}" for name, text in verdict.judge_errors.items()),
        )
    notes: list[str | None] = [
        *write_reports(layout, config.scenario, config.name, tables, verdict, facts, config.text)
    ]
    if tables is not None and config.tracker != "none":
        notes.append(
            _attempt(f"tracker={config.tracker}", lambda: _publish(config, layout, tables, verdict))
        )
    kept = tuple(note for note in notes if note)
    return Result(verdict=verdict, layout=layout, tables=tables, notes=kept)


def write_reports(
    layout: Layout,
    scenario: Scenario,
    name: str,
    tables: Tables | None,
    verdict: Verdict,
    facts: Mapping[str, Any],
    config_text: str,
) -> list[str]:
    """Write JUnit, Markdown, page and Parquet; returns a note for each that failed.

    None of them can lose the verdict: what goes wrong here is said, not raised.
    """

    def write_junit() -> None:
        from harness.report import junit

        junit.write(layout, scenario, verdict)

    def write_markdown() -> None:
        from harness.report import markdown

        write_text(layout.markdown, markdown.text(scenario, verdict))

    def write_page() -> None:
        from harness.report import html

        if tables is not None:
            html.write(layout, scenario, name, tables, verdict, facts, config_text)

    def write_parquet() -> None:
        from harness import parquet

        if tables is not None:
            parquet.write(layout, tables)

    jobs = {
        "junit.xml": write_junit,
        "verdict.md": write_markdown,
        "report.html": write_page,
        "records.parquet": write_parquet,
    }
    return [note for what, job in jobs.items() if (note := _attempt(what, job))]


def _publish(config: Config, layout: Layout, tables: Tables, verdict: Verdict) -> str:
    from harness import trackers

    told = {"scenario": config.name, "gpus": config.gpus, "seed": config.seed}
    told |= {"params": dict(config.params)}
    options = dict(config.tracker_options)
    return trackers.publish(config.tracker, options, layout, config.scenario, tables, verdict, told)


def _attempt(what: str, job: Callable[[], str | None]) -> str | None:
    """Run a job; return what it says, or a sentence about how it failed."""
    try:
        return job()
    except HarnessError as error:
        return f"{what} not written: {error}"
    except Exception as error:
        return f"{what} not written: {type(error).__name__}: {error}"


def point_key(config: Config, where: Place, torch_version: str | None) -> str:
    """Return what makes two runs one point of a sweep: configuration, source, torch, device."""
    digest = hashlib.sha256()
    shared = sorted(Path(harness.__file__).parent.glob("*.py"))
    for path in [*scenarios.sources(config.name), *shared]:
        digest.update(path.read_bytes())
    facts = {
        "scenario": config.name,
        "params": dict(config.params),
        "gpus": config.gpus,
        "seed": config.seed,
        "device": where.device,
        "source": digest.hexdigest(),
        "torch": torch_version,
        "crossrank": harness.__version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
