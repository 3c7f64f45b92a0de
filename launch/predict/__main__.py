"""`python -m launch.predict`: foresee what code does on several ranks, before it runs.

Two scenarios for each of five dimensions, with parameters drawn anew. You see the code that differs
and the claim, and say how likely it holds, is refuted, or is true in part, how large the effect is,
and which arms end with other weights than the reference. Your answers are sealed, the code runs,
and the run decides. 5 is what the base rates get, 10 is certain and right, below 6 is the warning
line. What a run leaves open costs nothing.

Exit codes: 0, 2 the command line or an answer will not do, 12 nothing can run, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import random
import secrets
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import scenarios
from harness.errors import UsageError
from harness.report import terminal
from launch import ending, newest, words
from launch.predict import answers, arms, history, questions, radar, report, seal, session
from launch.predict.asking import ask
from launch.predict.dimensions import Dimension
from launch.predict.history import Sitting
from launch.predict.questions import Question
from launch.runs import read_json
from launch.words import Key

KEYS: Mapping[str, Key] = {
    "answers": Key(about="a JSON file of answers, instead of asking", read=words.path),
    "each": Key(about="questions for each dimension", read=words.whole(1, 20), default=2),
    "dimension": Key(
        about="only this one: " + ", ".join(item.value for item in Dimension),
        read=words.one_of(*(item.value for item in Dimension)),
        default="",
    ),
    "draw": Key(about="a number that draws the same questions again", read=words.whole(0)),
    "player": Key(about="whose history it is; without it yours", read=words.text, default=""),
    "device": Key(
        about="auto, cpu or cuda", read=words.one_of("auto", "cpu", "cuda"), default="auto"
    ),
    "questions": Key(
        about="print the questions as JSON, run nothing", read=words.switched, default=False
    ),
    "check": Key(
        about="a session's folder: say whether its answers are those sealed", read=words.path
    ),
    "results": Key(about="directory of results", read=words.path, default=Path("results")),
    "json": Key(about="print the scores as JSON", read=words.switched, default=False),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, run, score; returns the exit code.

    Raises:
        HarnessError: if what was typed will not do, or nothing can be run.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    typed = words.parse(arguments, KEYS, f"{__doc__}\nmake predict")
    if typed["check"]:
        return check(typed["check"])
    names = newest.own()
    rates = questions.base_rates(names)
    number = secrets.randbelow(2**31) if typed["draw"] is None else typed["draw"]
    drawn = questions.draw(
        names,
        random.Random(number),  # noqa: S311 questions are no secrets
        each=typed["each"],
        only=Dimension(typed["dimension"]) if typed["dimension"] else None,
    )
    if typed["questions"]:
        print(json.dumps({"draw": number, "questions": [about(q) for q in drawn]}, indent=2))
        return 0
    return play(typed, names, rates, number, drawn)


def play(
    typed: Mapping[str, Any],
    names: Sequence[str],
    rates: Mapping[str, float],
    number: int,
    drawn: Sequence[Question],
) -> int:
    """Take the answers, run, and show the score; returns the exit code.

    Raises:
        HarnessError: if nobody can be asked, or nothing can be run.
    """
    out = terminal.console(stderr=typed["json"])
    player = typed["player"] or _player()
    known = session.known(names, typed["results"])
    legal = {topic.key for name in names for topic in questions.topics(name)}
    given = _answers(out, typed, drawn, rates, known, legal)
    where = session.folder(typed["results"])
    with terminal.bar(out) as show:
        found = session.run_all(
            drawn,
            given,
            where,
            device=typed["device"],
            tick=lambda done, names: show(done, len(drawn), names),
        )
    sitting = Sitting(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        player=player,
        draw=number,
        items=tuple(
            session.item(*one, rates, known.effects)
            for one in zip(drawn, given, found, strict=True)
        ),
    )
    before = history.read(where.parent, player)
    everything = [*before, sitting]
    scores, standings = report.scores(everything)
    picture = radar.svg(
        scores,
        standings,
        before=report.scores(before)[0] if before else None,
        title=f"Predictions of {player}, {sitting.date[:10]}",
    )
    session.write(where, sitting, drawn, found, picture)
    history.append(where.parent, sitting)
    report.show(out, drawn, sitting, found, everything, where)
    if typed["json"]:
        told = {"scores": scores, "standings": standings, **dataclasses.asdict(sitting)}
        print(json.dumps(told | {"session": str(where)}, indent=2))
    return 0


def _answers(
    out: Console,
    typed: Mapping[str, Any],
    drawn: Sequence[Question],
    rates: Mapping[str, float],
    known: session.Known,
    legal: Collection[str],
) -> list[answers.Answer]:
    from launch.warm import Warm, usable

    if typed["answers"] is not None:
        read = answers.read(typed["answers"], rates, legal)
        given = [read(question.topic) for question in drawn]
        for question, answer in zip(drawn, given, strict=True):
            arms.check(answer.differ or (), question.topic)
        if usable():
            Warm.heat()
        return given
    if session.hidden(out) or not sys.stdin.isatty():
        raise UsageError(
            "nobody can be asked here: there is no terminal\n"
            "type answers=FILE, and questions=true draw=7 to see what is asked"
        )
    if usable():
        # torch is imported while somebody thinks.
        Warm.heat()
    return [
        ask(out, place, drawn, rates, known.unit(question.topic))
        for place, question in enumerate(drawn, 1)
    ]


def about(question: Question) -> dict[str, Any]:
    """Return a question as JSON; nothing in it gives the answer away."""
    return {
        "key": question.topic.key,
        "dimension": question.dimension.value,
        "text": question.topic.text,
        "gpus": question.gpus,
        "seed": question.seed,
        "params": dict(question.params),
        "drawn": list(question.drawn),
        "arms": list(arms.asked(scenarios.load(question.topic.scenario))),
    }


def check(where: Path) -> int:
    """Say whether the answers of a session are those that were sealed; returns the exit code.

    Raises:
        RecordError: if a file is missing or cannot be read.
    """
    wrong = 0
    for item in read_json(where / session.ANSWERS)["items"]:
        if not item["run"]:
            continue
        same = seal.check(where / item["run"], item["answer"], item["nonce"])
        wrong += not same
        print(f"{'sealed before the run' if same else 'NOT what was sealed'}  {item['question']}")
    return 2 if wrong else 0


def _player() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "player"


if __name__ == "__main__":
    ending.run(main)
