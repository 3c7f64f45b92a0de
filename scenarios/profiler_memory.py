"""The profiler and memory: record_shapes records shapes; memory takes profile_memory.

An article reads memory peaks from profile(record_shapes=True). Without profile_memory no event
holds a byte, and sorting the table by memory sorts zeros. With it each operation holds what it
allocated, and a peak is still to be summed up from the timeline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/profiler_memory.yaml."""

    rows: int = field(metadata=at_least(1))
    width: int = field(metadata=at_least(1))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Profile one product of matrices; what the profiler is asked to record is what differs."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    x = torch.ones(p.rows, p.width, dtype=torch.float64)
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=arm["shapes"],
        profile_memory=arm["memory"],
    ) as profiler:
        x @ x.T
    found = [event for event in profiler.key_averages(group_by_input_shape=True)]
    product = [event for event in found if event.key == "aten::mm"]
    held = sum(abs(event.self_cpu_memory_usage) for event in found)
    rank.log(step=0, bytes=held, products=len(product))
    rank.log(step=0, product=sum(event.self_cpu_memory_usage for event in product))
    rank.log(step=0, shapes=str([event.input_shapes for event in product]))


@symptom(REFUTED, settles="B44")
def shapes_give_memory(t: Tables) -> Finding:
    """profile(record_shapes=True) shows how much memory operations take."""
    t.require("shapes")
    held = t.value("shapes", "bytes", step=0)
    seen = t.value("shapes", "products", step=0)
    reason = f"{seen} products are seen, and {held} bytes in all events together"
    return (holds if held else refuted)(reason, effect=float(held), unit="bytes")


@mechanism(HOLDS)
def shapes_give_shapes(t: Tables) -> Finding:
    """It records the shapes that operations were given."""
    t.require("shapes", "nothing")
    with_, without = (t.value(arm, "shapes", step=0) for arm in ("shapes", "nothing"))
    due = [t.root_params["rows"], t.root_params["width"]]
    right = str(due) in with_ and str(due) not in without
    return (holds if right else refuted)(f"{with_} with it, {without} without")


@remedy(HOLDS)
def profile_memory(t: Tables) -> Finding:
    """profile_memory=True gives the bytes of the result of a product."""
    t.require("memory")
    held, due = t.value("memory", "product", step=0), 8 * t.root_params["rows"] ** 2
    reason = f"the product holds {held} bytes; its result has {due}"
    return (holds if held == due else refuted)(reason, effect=float(held), unit="bytes")


SCENARIO = Scenario(
    title="The profiler records no memory with record_shapes: it takes profile_memory",
    family="memory",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        shapes_give_memory=("record_shapes gives memory", "record_shapes gives no byte of memory"),
        profile_memory=("profile_memory does", "nor does profile_memory"),
    ),
    arms=(
        reference("nothing", "a bare profiler", ranks=1, shapes=False, memory=False),
        faulty("shapes", "record_shapes=True", ranks=1, shapes=True, memory=False),
        fixed("memory", "profile_memory=True", ranks=1, shapes=True, memory=True),
    ),
    claims=(shapes_give_memory, shapes_give_shapes, profile_memory),
)
