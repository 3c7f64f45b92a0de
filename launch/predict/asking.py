"""Ask somebody: the code that differs, the claim, and what will be found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rich.console import Console
from rich.text import Text

import scenarios
from harness.plural import number_of
from harness.report.source import sources
from launch.predict import answers, arms
from launch.predict.answers import Answer
from launch.predict.questions import Question, Topic
from launch.predict.score import OUTCOMES
from launch.show import code
from launch.statements import statements

T = TypeVar("T")


def ask(
    out: Console,
    number: int,
    questions: Sequence[Question],
    rates: Mapping[str, float],
    unit: str | None,
) -> Answer:
    """Show a question and return the answer.

    Args:
        out: the terminal.
        number: which question, from 1 on.
        questions: all of them.
        rates: what no answer counts as.
        unit: what the effect is counted in; empty if nobody knows, None if there is no effect.
    """
    question = questions[number - 1]
    show(out, f"Question {number} of {len(questions)}", question)
    usual = ", ".join(f"{name} {100 * rates[name]:.0f} %" for name in OUTCOMES)
    prompt = (
        "holds, refuted, partly in percent (70 20 10), or h, r, p if you are certain;\n"
        f"Enter for what is usual ({usual}): "
    )
    given = _until(out, prompt, lambda typed: answers.probabilities(typed, rates))
    interval = None
    if unit is not None:
        of = f" ({unit})" if unit else ""
        prompt = f"size of the effect{of}, 80 % sure, as two numbers (1e-3 0.1); Enter to pass: "
        interval = _until(out, prompt, answers.interval)
    return Answer(probabilities=given, interval=interval, differ=_differ(out, question))


def _differ(out: Console, question: Question) -> tuple[str, ...] | None:
    scenario = scenarios.load(question.topic.scenario)
    legal, first = arms.asked(scenario), arms.reference(scenario)
    if not legal or first is None:
        return None
    prompt = (
        f"which arms end with other weights than {first.name}, rounding apart\n"
        f"({' '.join(legal)}), or none; Enter to pass: "
    )
    return _until(out, prompt, lambda typed: arms.typed(typed, legal))


def show(out: Console, title: str, question: Question) -> None:
    """Show the code that differs, the run and the claim, and nothing that gives it away."""
    topic = question.topic
    scenario = scenarios.load(topic.scenario)
    out.print()
    out.print(Text.assemble((f"{title}: ", "dim"), (question.dimension.value, "bold underline")))
    for source in sources(scenario)[0]:
        out.print()
        code(out, source)
    out.print()
    for arm in scenario.arms:
        options = " ".join(f"{key}={value}" for key, value in arm.options.items())
        one = " (one process)" if arm.ranks == 1 else ""
        out.print(Text(f"arm {arm.name}{one}: {options}"), soft_wrap=True)
    params = " ".join(f"{key}={value}" for key, value in question.params.items())
    run = f"{number_of(question.gpus, 'rank')}, seed {question.seed}, {params}"
    out.print(Text(run, style="dim"), soft_wrap=True)
    said = "an article says" if topic.id in statements() else "claim"
    out.print()
    for claim in said_before(topic):
        # Claims refer to each other: "the same", "and then".
        out.print(Text(f"said before: {claim}", style="dim"), soft_wrap=True)
    out.print(Text.assemble((f"{said}: ", "dim"), (topic.text, "bold")), soft_wrap=True)


def said_before(topic: Topic) -> list[str]:
    """Return the claims of the scenario that stand before this one, the last two of them."""
    claims = scenarios.load(topic.scenario).claims
    first = min(i for i, claim in enumerate(claims) if claim.name == topic.by[0].claim)
    return [claim.text for claim in claims[max(0, first - 2) : first]]


def _until(out: Console, prompt: str, read: Callable[[str], T]) -> T:
    while True:
        try:
            return read(out.input(Text(prompt, style="cyan")))
        except EOFError:
            # Nobody is there any more: nothing is run.
            raise KeyboardInterrupt from None
        except ValueError as error:
            out.print(Text(str(error), style="yellow"))
