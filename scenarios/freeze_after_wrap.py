"""A layer frozen after wrapping: one update with each rank's own gradients, and then an error.

DDP waits for the gradient of every parameter that it was given. `requires_grad_(False)` on one of
them keeps its bucket from being complete, and no bucket is handed out before all are. The first
backward after it ends as usual, with each rank's own gradients in *all* parameters, and they are
used. Only the next forward raises. Reported, for the error, in pytorch/pytorch#22049 and #43259.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/freeze_after_wrap.yaml."""

    whole: int = field(metadata=at_least(1))
    frozen: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train the whole net, then freeze its first layer; what DDP is told about it differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from harness.collectives import count_collectives
    from scenarios._models import gradients, net, rows, weights

    layers = net(rank)
    told: dict[str, Any] = {arm["told"]: arm["value"]} if arm.get("told") else {}
    model = DistributedDataParallel(layers, **told)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.whole + p.frozen):
        if step == p.whole:
            layers[0].requires_grad_(False)
            if arm.get("wraps_again"):
                model = DistributedDataParallel(layers)
        optimizer.zero_grad()
        try:
            output = model(x)
        except RuntimeError as error:
            rank.log(step=step, phase="raised", error=str(error).partition(". ")[0])
            return
        with count_collectives() as calls:
            torch.nn.functional.mse_loss(output, y).backward()
        optimizer.step()
        rank.log(step=step, reductions=calls.count("all_reduce"))
        rank.snapshot(step=step, gradients=gradients(model), weights=weights(model))


def silent_step(t: Tables, arm: str) -> Finding:
    """Say whether the first update after freezing is made with other gradients on every rank."""
    t.require(arm)
    at = t.root_params["whole"]
    digests = [t.series(arm, "gradients.digest", rank=r) for r in t.ranks(arm)]
    before, after = (len({of_rank[step] for of_rank in digests}) for step in (at - 1, at))
    reason = (
        f"{arm}: {before} gradient on {len(digests)} ranks before the freeze, {after} in the step "
        f"after it; {t.value(arm, 'reductions', step=at)} all-reduces, no error"
    )
    silent = (before, after) == (1, len(digests))
    return (holds if silent else refuted)(reason, effect=float(after), unit="gradients")


@symptom(HOLDS)
def first_step_is_local(t: Tables) -> Finding:
    """The first step after freezing uses each rank's own gradients in all parameters, unsaid."""
    return silent_step(t, "after_wrap")


@symptom(HOLDS, source="pytorch/pytorch#22049")
def next_forward_raises(t: Tables) -> Finding:
    """The forward after that raises on every rank: "Expected to have finished reduction"."""
    t.require("after_wrap")
    ranks, at = t.ranks("after_wrap"), t.root_params["whole"] + 1
    said = [t.value("after_wrap", "error", step=at, phase="raised", rank=r) for r in ranks]
    late = sum("finished reduction" in error for error in said)
    reason = f"the forward of step {at} raises on {late} of {len(said)} ranks: {said[0]}"
    return (holds if late == len(said) else refuted)(reason, effect=float(late), unit="ranks")


@remedy(REFUTED, settles="A74")
def at_any_time(t: Tables) -> Finding:
    """requires_grad=False may be set at any time: N ranks go on training like one process."""
    return matches(t, "after_wrap", "one_process", "weights", step=t.root_params["whole"])


@remedy(REFUTED)
def small_buckets_help(t: Tables) -> Finding:
    """With small buckets the layers that are still trained are averaged."""
    return negated(silent_step(t, "small_buckets"))


@remedy(REFUTED)
def static_graph_helps(t: Tables) -> Finding:
    """With static_graph=True, which tells DDP what is used, they are averaged."""
    return negated(silent_step(t, "static_graph"))


@remedy(HOLDS)
def flag_or_again(t: Tables) -> Finding:
    """With find_unused_parameters=True, or wrapped again, N ranks train like one process."""
    return all_of(*(like_one_process(t, arm) for arm in ("find_unused", "wrapped_again")))


SCENARIO = Scenario(
    title="A layer frozen after wrapping: one silent update per rank alone, and then an error",
    family="synchronisation",
    cause="unused_parameters",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        first_step_is_local=("the step after the freeze is each rank's own", "it is right"),
        next_forward_raises=("the next one raises", "no step raises"),
        flag_or_again=("the flag, or wrapping again, helps", "no flag, no wrapping again helps"),
    ),
    arms=(
        one_process("one process, wraps again", wraps_again=True),
        faulty("after_wrap", "requires_grad=False after wrapping"),
        faulty("small_buckets", "small buckets", told="bucket_cap_mb", value=1e-5),
        faulty("static_graph", "static_graph=True", told="static_graph", value=True),
        fixed("find_unused", "the flag", told="find_unused_parameters", value=True),
        fixed("wrapped_again", "freeze, wrap again", wraps_again=True),
    ),
    claims=(
        first_step_is_local,
        next_forward_raises,
        at_any_time,
        small_buckets_help,
        static_graph_helps,
        flag_or_again,
    ),
)
