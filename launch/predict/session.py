"""One session: ask, seal, run, score, and show how the player has come along."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import scenarios
from harness.errors import HarnessError, PrerequisiteError
from harness.plan import Layout, Plan, write_text
from harness.scenario import Finding
from launch import devices, newest
from launch.compose import compose
from launch.corpus.cases import Case
from launch.corpus.pool import Pool, Stoppable, budget
from launch.predict import arms, history, score
from launch.predict.answers import Answer
from launch.predict.history import Item, Sitting
from launch.predict.questions import Question, Topic
from launch.predict.seal import Sealed, seal
from launch.runs import stamp

ANSWERS = "answers.json"
RADAR = "radar.svg"


@dataclass(frozen=True, kw_only=True)
class Known:
    """What earlier runs on this machine tell about effects."""

    effects: Sequence[float]
    units: Mapping[str, str | None]
    """Scenario and claim -> unit of its effect; None if it has none."""

    def unit(self, topic: Topic) -> str | None:
        """Return the unit of a topic's effect: empty if nobody knows, None if it has none."""
        if len(topic.by) > 1:
            return None
        return self.units.get(f"{topic.scenario}.{topic.by[0].claim}", "")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the run of one question has come to."""

    outcome: str
    reason: str
    effect: float | None
    run: Path | None
    sealed: Sealed | None
    differ: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    """Arms that could be compared with the reference, and whether they end elsewhere."""


def known(names: Sequence[str], results: Path) -> Known:
    """Return the effects of the newest sound runs."""
    effects: list[float] = []
    units: dict[str, str | None] = {}
    for name in names:
        run = newest.sound(name, results)
        for finding in run.verdict["findings"] if run else ():
            effect = finding["effect"]
            units[f"{name}.{finding['claim']}"] = None if effect is None else finding["unit"]
            size = max(abs(float(effect or 0.0)), float(finding["floor"] or 0.0))
            if effect is not None and math.isfinite(size):
                effects.append(size)
    return Known(effects=effects, units=units)


def folder(results: Path) -> Path:
    """Make the directory of one session.

    Raises:
        PrerequisiteError: if it cannot be made.
    """
    root = results.expanduser().absolute() / history.FOLDER
    now = stamp()
    path = root / now
    number = 1
    while path.exists():
        number += 1
        path = root / f"{now}-{number}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise PrerequisiteError(
            f"cannot make {path}: {error.strerror}\ntype results=DIR to write somewhere else"
        ) from error
    return path


def run_all(
    questions: Sequence[Question],
    answers: Sequence[Answer],
    where: Path,
    *,
    device: str,
    tick: Callable[[int, str], None],
) -> list[Found]:
    """Seal every answer, run every question, and return what was found, in the same order.

    Raises:
        HarnessError: if nothing can run here.
        KeyboardInterrupt: if somebody ends it; what was not through is lost.
    """
    from launch.reproduce import engine_for

    available = devices.cuda_devices() if device != "cpu" else 0
    places = {q.gpus: devices.choose(q.gpus, device, available) for q in questions}
    cases = [_case(question, where, device) for question in questions]
    index = {id(case): number for number, case in enumerate(cases)}
    assert cases[0].config is not None
    pool = Pool(ranks=budget(places[questions[0].gpus].device))
    engine = Stoppable(engine_for(cases[0].config), pool.stop)
    found: dict[int, Found] = {}

    def work(case: Case) -> Found:
        number = index[id(case)]
        return _carry_out(case, engine, places[case.gpus], questions[number], answers[number])

    def done(case: Case, result: Found) -> None:
        found[index[id(case)]] = result

    def under_way() -> None:
        tick(len(found), ", ".join(case.name for case in pool.under_way))

    try:
        pool.run(cases, work, done, under_way)
    finally:
        engine.close()
    return [found[number] for number in range(len(cases))]


def _case(question: Question, where: Path, device: str) -> Case:
    name = question.topic.scenario
    config = compose(
        name,
        gpus=question.gpus,
        results=where,
        seed=question.seed,
        device=device,
        params=question.params,
    )
    return Case(name=name, gpus=question.gpus, scenario=scenarios.load(name), config=config)


def _carry_out(
    case: Case, engine: Stoppable, place: devices.Place, question: Question, answer: Answer
) -> Found:
    """Run one question; never raises."""
    from launch.reproduce import reproduce

    config = case.config
    assert config is not None
    made: list[Sealed] = []
    layouts: list[Layout] = []

    def started(plan: Plan) -> None:
        layouts.append(Layout(config.results / config.name / plan.run_id))
        made.append(seal(layouts[0], answer))

    problem = ""
    findings: Mapping[str, Finding] = {}
    try:
        result = reproduce(config, engine, place, started=started, changed=lambda progress: None)
        findings = result.verdict.findings
        problem = "; ".join(result.verdict.failures)
    except HarnessError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    mine = [findings[item.claim] for item in question.topic.by if item.claim in findings]
    outcomes = {name: finding.outcome.value for name, finding in findings.items()}
    # How far rounding goes below its floor is chance.
    sizes = [size for finding in mine if (size := _size(finding)) is not None]
    return Found(
        outcome="unknown" if problem else question.topic.outcome(outcomes),
        reason=problem or "; ".join(finding.reason for finding in mine),
        effect=sizes[0] if len(mine) == 1 and sizes else None,
        run=layouts[0].root if layouts else None,
        sealed=made[0] if made else None,
        differ=_differ(layouts, question) if not problem else {},
    )


def _differ(layouts: Sequence[Layout], question: Question) -> Mapping[str, bool]:
    scenario = scenarios.load(question.topic.scenario)
    return arms.differing(layouts[0], scenario) if layouts else {}


def _size(finding: Finding) -> float | None:
    if finding.effect is None:
        return None
    size = max(abs(finding.effect), finding.floor or 0.0)
    return size if math.isfinite(size) else None


def item(
    question: Question,
    answer: Answer,
    found: Found,
    rates: Mapping[str, float],
    effects: Sequence[float],
) -> Item:
    """Score one answer against what its run has found; what is unknown has no skill."""
    verdict = number = skill = None
    sets = None if answer.differ is None else arms.skill(answer.differ, found.differ)
    if found.outcome != "unknown":
        verdict = score.verdict_skill(answer.probabilities, found.outcome, rates)
        if found.effect is not None and answer.interval is not None:
            number = score.number_skill(answer.interval, found.effect, effects)
        parts = [part for part in (verdict, number, sets) if part is not None]
        skill = statistics.fmean(parts)
    return Item(
        dimension=question.dimension.value,
        key=question.topic.key,
        outcome=found.outcome,
        probabilities=dict(answer.probabilities),
        skill=skill,
        verdict_skill=verdict,
        number_skill=number,
        arms_skill=sets if skill is not None else None,
        differ=answer.differ,
        effect=found.effect,
        interval=answer.interval,
    )


def write(
    where: Path,
    sitting: Sitting,
    questions: Sequence[Question],
    found: Sequence[Found],
    picture: str,
) -> None:
    """Write what was asked, answered and found, with what it takes to check the seals.

    Raises:
        RecordError: if a file cannot be written.
    """
    told: list[dict[str, Any]] = []
    for question, item_, result in zip(questions, sitting.items, found, strict=True):
        sealed = result.sealed
        told.append(
            {
                "question": item_.key,
                "text": question.topic.text,
                "run": str(result.run.relative_to(where)) if result.run else None,
                "answer": dataclasses.asdict(sealed.answer) if sealed else None,
                "nonce": sealed.nonce if sealed else None,
                "sha256": sealed.digest if sealed else None,
                "outcome": result.outcome,
                "reason": result.reason,
                "effect": result.effect,
                "differ": dict(result.differ),
                "skill": item_.skill,
            }
        )
    whole = {"date": sitting.date, "player": sitting.player, "draw": sitting.draw, "items": told}
    write_text(where / ANSWERS, json.dumps(whole, indent=2) + "\n")
    write_text(where / RADAR, picture)


def hidden(out: Console) -> bool:
    """Say whether nobody can be asked: there is no terminal."""
    return not out.is_terminal
