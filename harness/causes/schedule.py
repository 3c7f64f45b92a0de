"""Steps of schedules, and gradients between updates: more or fewer than the user counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from harness.causes.across import usual
from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence
from harness.watch.journal import Event

_FEWEST = 3
"""Windows between updates from which on a number of them is a habit."""


def _many_steps(evidence: Evidence) -> Iterator[tuple[Event, int]]:
    """Yield the schedulers that are stepped several times for each update, and how often."""
    for event in evidence.events("schedule"):
        windows = [steps for steps, times in event["per_update"] for _ in range(min(times, 4096))]
        steps = usual(windows, share=0.9)
        if len(windows) >= _FEWEST and steps is not None and steps > 1:
            yield event, steps


def _ended_early(event: Event) -> str | None:
    """Say how a schedule ended before the run did, or None: then it may have been made for it."""
    updates, zero, total = event["updates"], event["zero_from"], event["total"]
    if zero is not None and updates - zero >= max(2, updates // 5):
        return f"the learning rate is 0 from update {zero} of {updates} on"
    # A warm-up ends as well, and the run goes on.
    ends = event["class"] not in ("LinearLR", "ConstantLR")
    if ends and isinstance(total, int) and event["steps"] > 1.2 * total:
        return f"the schedule ends after {total} steps, and was stepped {event['steps']} times"
    return None


def _backwards(evidence: Evidence, event: Event) -> int | None:
    windows = evidence.updates(event["rank"], event["optimizer"])
    found: int | None = usual([w["backwards"] for w in windows if w.get("backwards")])
    return found


def _stepped(event: Event, steps: int) -> Diagnosis:
    ended = _ended_early(event)
    because = [f"{event['class']}.step() was called {steps} times for each update"]
    return Diagnosis(
        # A schedule that is written in as many steps is right.
        strength=Strength.FACT if ended is None else Strength.PROVEN,
        because=tuple(because if ended is None else [*because, ended]),
        where=event["at"],
        explains=False,
    )


@cause(
    family="schedule",
    sees="The learning rate reaches its end after 1/N of the run.",
    why="A wrapper steps the scheduler once per rank, because it expects a schedule written in "
    "batches of one process, and the schedule is written in updates.",
    confirm="Count the calls of scheduler.step() per optimizer.step().",
    change="step the scheduler once per update, or write the schedule in world_size times as many",
    fix="""
optimizer.step()
scheduler.step()                   # once, whatever the number of ranks
""",
    reported=("huggingface/accelerate#2142", "huggingface/accelerate#2926"),
)
def scheduler_steps_times_world(evidence: Evidence) -> Diagnosis | None:
    """Recognise as many scheduler steps per update as there are ranks."""
    for event, steps in _many_steps(evidence):
        if steps == evidence.world_size != _backwards(evidence, event):
            return _stepped(event, steps)
    return None


@cause(
    family="schedule",
    sees="The learning rate reaches its end after a fraction of the run.",
    why="The scheduler is stepped for each micro-batch, and its length is given in updates.",
    confirm="Count the calls of scheduler.step() per optimizer.step().",
    change="step the scheduler where the optimizer is stepped",
    fix="""
if (index + 1) % accumulation == 0:
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
""",
    reported=("tracel-ai/burn#5695",),
)
def scheduler_steps_per_micro_batch(evidence: Evidence) -> Diagnosis | None:
    """Recognise as many scheduler steps per update as backward passes."""
    for event, steps in _many_steps(evidence):
        if steps == _backwards(evidence, event):
            found = _stepped(event, steps)
            if steps != evidence.world_size or found.strength == Strength.FACT:
                return found
            alike = "and there are as many ranks: a wrapper that steps once for each looks the same"
            return replace(found, strength=Strength.LIKELY, because=(*found.because, alike))
    return None


@cause(
    family="schedule",
    sees="The loss falls, then explodes; steps grow with time.",
    why="backward adds to the gradients that are there; nothing clears those of the last update.",
    confirm="Print the gradient norm before each update: it grows with the number of updates.",
    change="call optimizer.zero_grad() before the next backward pass",
    fix="""
optimizer.step()
optimizer.zero_grad()
""",
)
def gradients_not_cleared(evidence: Evidence) -> Diagnosis | None:
    """Recognise updates whose gradients still hold those of the update before."""
    for rank in evidence.ranks:
        numbers = sorted({u["optimizer"] for u in evidence.updates(rank)})
        for number in numbers:
            windows = list(evidence.updates(rank, number))[1:]
            states = [w.get(f"gradients of optimizer {number}", []) for w in windows]
            kept = [bool(s) and all(state == "kept" for state in s) for s in states]
            # At the beginning of an epoch they may be cleared.
            enough = len(kept) if len(numbers) > 1 else len(kept) // 2
            if sum(kept) >= max(_FEWEST, enough):
                first = windows[kept.index(True)]
                return Diagnosis(
                    strength=Strength.PROVEN,
                    because=(
                        f"before {sum(kept)} of {len(kept)} updates, backward added to the "
                        "gradients that the update before had used",
                    ),
                    where=next(iter(first.get("backward_at", ())), None),
                    step=first["update"],
                    explains=False,
                )
    return None


@cause(
    family="schedule",
    sees="The loss stays where it began; nothing fails.",
    why="Gradients are cleared between backward and the update, and an optimizer leaves a "
    "parameter without a gradient as it is.",
    confirm="Print p.grad of one parameter right before optimizer.step(): it is None, or zeros.",
    change="call optimizer.zero_grad() before the backward pass, or after the update",
    fix="""
optimizer.zero_grad()
loss.backward()
optimizer.step()                   # nothing in between takes gradients away
""",
)
def gradients_cleared_before_step(evidence: Evidence) -> Diagnosis | None:
    """Recognise an optimizer that never finds the gradients that backward had left."""
    for number in sorted({u["optimizer"] for r in evidence.ranks for u in evidence.updates(r)}):
        cleared = f"cleared_before_step of optimizer {number}"
        # What the first update was made from is not known.
        windows = [list(evidence.updates(rank, number))[1:] for rank in evidence.ranks]
        if all(len(of) >= _FEWEST and all(_in_vain(w, cleared) for w in of) for of in windows):
            first = windows[0][0]
            return Diagnosis(
                strength=Strength.PROVEN,
                because=(
                    f"at {len(windows[0])} of {len(windows[0])} updates no parameter had a "
                    "gradient, or all had zeros, and backward had left some",
                ),
                where=next(iter(first.get("backward_at", ())), None),
                step=first["update"],
                explains=False,
            )
    return None


def _in_vain(window: Event, cleared: str) -> bool:
    """Say whether an update was made from nothing, and not to skip a batch, and not by hand."""
    finite = all(math.isfinite(loss) for loss in window.get("losses", ()))
    return bool(window.get(cleared)) and finite and not window.get("parameters_written")


@cause(
    family="schedule",
    sees="The loss looks right; gradients are too small, and larger accumulation changes nothing.",
    why="Gradients are cleared inside the accumulation, so that only the last micro-batch counts.",
    confirm="Print the gradient norm after each micro-batch: it must grow within a window.",
    change="clear gradients after the update, not between micro-batches",
    fix="""
for index, batch in enumerate(loader):
    (loss_of(batch) / accumulation).backward()
    if (index + 1) % accumulation == 0:
        optimizer.step()
        optimizer.zero_grad()      # here, and nowhere else
""",
    reported=("NVIDIA-NeMo/Automodel#3530",),
)
def grads_wiped_between_microbatches(evidence: Evidence) -> Diagnosis | None:
    """Recognise gradients that are taken away between the backward passes of an update."""
    for rank in evidence.ranks:
        updates = list(evidence.updates(rank))
        # With several optimizers, a backward pass may well be none of the other one's business.
        if {u["optimizer"] for u in updates} != {0}:
            continue
        windows = [u for u in updates if u.get("backwards", 0) > 1]
        wiped = [
            w
            for w in windows
            if "gradients of optimizer 0" in w
            and all(state == "none" for state in w["gradients of optimizer 0"][1:])
            and _accumulates(w)
        ]
        if len(wiped) >= 2 and len(wiped) >= len(windows) - 1:
            return Diagnosis(
                strength=Strength.LIKELY,
                because=(
                    f"{wiped[0]['backwards']} backward passes go before each update, and there are "
                    "no gradients left of the earlier ones when the next one begins",
                ),
                where=next(iter(wiped[0].get("backward_at", ())), None),
                step=wiped[0]["update"],
                explains=False,
            )
    return None


def _accumulates(window: Event) -> bool:
    """Say whether the backward passes are meant to be added up: scaled, or under no_sync."""
    share = 1 / window["backwards"]
    factors = [abs(term[3]) for terms in window.get("loss_terms", ()) for term in terms]
    scaled = bool(factors) and all(abs(f - share) < 1e-6 for f in factors)
    return scaled or bool(window.get("forwards_without_sync"))
