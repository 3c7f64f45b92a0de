"""Hand-written runs for the tests of the reports: a toy scenario and the records it left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from harness.plan import ArmPlan, Layout, Plan, write_text
from harness.record import Header, Value, Writer
from harness.scenario import (
    Arm,
    Claim,
    Finding,
    Kind,
    Outcome,
    Plot,
    Role,
    Scenario,
    holds,
    refuted,
    unknown,
)
from harness.tables import Tables
from harness.verdict import Verdict, decide

Metrics = Callable[[str, int, int], Mapping[str, Value]]
"""(arm, rank, step) -> what the rank recorded."""


def record(
    root: Path,
    arms: Mapping[str, int],
    steps: int,
    metrics: Metrics,
    *,
    phases: tuple[str, ...] = ("",),
) -> Layout:
    """Write the streams of a run in which every rank came to its end."""
    layout = Layout(root)
    plan = Plan(
        run_id="r1",
        scenario="toy",
        params={},
        arms=tuple(
            ArmPlan(name=name, ranks=ranks, repeats=1, isolated=False)
            for name, ranks in arms.items()
        ),
        world_size=max(arms.values()),
        device="cpu",
        backend="gloo",
        seed=1,
        engine="warm",
        collective_timeout_s=5.0,
        arm_timeout_s=60.0,
    )
    write_text(layout.plan, plan.to_json())
    for arm, ranks in arms.items():
        for rank in range(ranks):
            writer = Writer(layout, header(arm, rank, ranks))
            for step in range(steps):
                for phase in phases:
                    writer.write(metrics(arm, rank, step), repeat=0, step=step, phase=phase)
            writer.end("completed")
    return layout


def header(arm: str, rank: int, ranks: int) -> Header:
    """Return the header of one stream of a toy run."""
    return Header(run="r1", scenario="toy", arm=arm, rank=rank, world_size=ranks)


def run(rank: Any, arm: Arm, params: Any) -> None:
    """Stand in for a training loop, so that the page has a branch to show."""
    # the next line is where the arms differ
    bound = 0.5 if arm["clip"] else None
    for step in range(params.steps):
        rank.log(step=step, loss=float(bound or 0))
    if arm.get("edit") == "rank 0":
        rank.log(step=0, note=f"edited by {arm.name}")


def toy(**changes: Any) -> Scenario:
    """Return a scenario of three claims, one of each outcome, and three arms."""
    fields: dict[str, Any] = {
        "title": "A running variance that is clipped after the step is overwritten",
        "family": "buffers",
        "cause": "buffer_broadcast",
        "claims": (
            Claim(
                name="clip_is_lost",
                kind=Kind.SYMPTOM,
                text="A clip of running_var on rank 1 is gone after the next forward.",
                expects=Outcome.HOLDS,
                judge=_clip_is_lost,
                source="pytorch/pytorch#22049",
            ),
            Claim(
                name="sync_after_backward",
                kind=Kind.MECHANISM,
                text="The statistics are synchronised between backward and step.",
                expects=Outcome.REFUTED,
                judge=lambda tables: refuted(
                    "between backward and step 0 of 240 buffers changed",
                    effect=0.0,
                    floor=None,
                    unit="buffers changed",
                ),
            ),
            Claim(
                name="eps_helps",
                kind=Kind.REMEDY,
                text="A larger eps has the same effect as the clip.",
                expects=Outcome.REFUTED,
                judge=lambda tables: unknown("no arm of this run raises eps"),
            ),
        ),
        "arms": (
            Arm(
                name="one",
                role=Role.REFERENCE,
                about="one process",
                options={"clip": True},
                ranks=1,
            ),
            Arm(
                name="clip_rank1",
                role=Role.FAULTY,
                about="clips on rank 1 only",
                options={"clip": True, "edit": "rank 1"},
            ),
            Arm(
                name="clip_hook",
                role=Role.FIXED,
                about="clips in a forward hook on all ranks",
                options={"clip": True, "edit": "all"},
            ),
        ),
        "params": dict,
        "run": run,
        "headline": lambda findings: "The clip is lost at the next forward, on every rank but 0.",
        "plots": (
            Plot(
                metric="var",
                title="Smallest running variance",
                log=True,
                floor=lambda tables: 1e-7,
                unit="variance",
            ),
            Plot(metric="loss", title="Loss"),
        ),
    }
    return Scenario(**(fields | changes))


def _clip_is_lost(tables: Tables) -> Finding:
    last = tables.last("clip_rank1", "var", rank=1)
    return holds(
        f"running_var on rank 1 ends at {last:.3g}, the bound is 0.5",
        effect=3.2e-2,
        floor=9.1e-8,
        unit="relative L2 distance",
        evidence={"var.rank1": last, "steps": 40, "digest": "9f3a5c", "bitwise": True},
    )


def metrics(arm: str, rank: int, step: int) -> Mapping[str, Value]:
    """Return curves that agree between ranks and arms, except in the faulty arm."""
    drift = 10 ** (-6 + step / 8) * (1 + rank) if arm == "clip_rank1" else 2e-8 * (1 + step / 40)
    loss: float = 0.7 * math.exp(-step / 15) + (0.02 * rank if arm == "clip_rank1" else 0.0)
    if arm == "clip_rank1" and rank == 2 and step >= 30:
        loss = math.nan
    return {"var": drift, "loss": loss, "var.digest": f"{rank}{step}"}


ENVIRONMENT: Mapping[str, Any] = {
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
    "source": {"commit": "0123abc", "dirty": False},
    "argv": ["python", "-m", "launch", "scenario=toy", "gpus=4"],
    "host": "node-1",
}


def toy_run(root: Path, **changes: Any) -> tuple[Layout, Scenario, Tables, Verdict]:
    """Return a recorded and judged run of the toy scenario."""
    scenario = toy(**changes)
    arms = {arm.name: arm.ranks or 4 for arm in scenario.arms}
    layout = record(root, arms, 40, metrics)
    tables = Tables.read(layout)
    return layout, scenario, tables, decide(scenario, "toy", tables)


EVIL = "</script><img src=x onerror=alert(1)>'\"]]>&amp;<!-- \u00fc\u4e2d\U0001f600\u202e|`*_"
"""Markup, quotes, an end of CDATA, an entity, and letters beyond ASCII, all in one."""


def evil_run(
    root: Path, text: str = EVIL
) -> tuple[tuple[Layout, Scenario, Tables, Verdict], list[str]]:
    """Return a run whose every text is hostile, and the texts the reports have to show."""
    said: list[str] = []

    def evil(field: str) -> str:
        said.append(f"{field} {text}")
        return said[-1]

    def throws(tables: Tables) -> Finding:
        raise ValueError(evil("raised"))

    finding = holds(
        evil("reason"), effect=1.0, floor=1e-9, unit=evil("unit"), evidence={evil("key"): evil("v")}
    )
    claims = tuple(
        Claim(
            name=evil(f"claim {judge.__name__}"),
            kind=Kind.SYMPTOM,
            text=evil("text"),
            expects=Outcome.REFUTED,
            judge=judge,
            source=evil("source"),
        )
        for judge in (lambda tables: finding, throws)
    )
    arms = (
        Arm(name="one", role=Role.REFERENCE, about=evil("about"), options={evil("o"): evil("v")}),
        Arm(name="two", role=Role.FAULTY, about="b", options={"a": 1, "b": 2, "c": 3, "d": 4}),
    )
    metric = "metric " + text
    scenario = toy(
        title=evil("title"),
        family=evil("family"),
        claims=claims,
        arms=arms,
        headline=lambda findings: evil("headline"),
        plots=(
            Plot(
                metric=metric, title=evil("plot"), phase=evil("phase"), unit=evil("unit"), log=True
            ),
        ),
    )
    phase = said[-2]
    layout = record(
        root,
        {"one": 2, "two": 2},
        3,
        lambda arm, rank, step: {metric: float(rank + step)},
        phases=(phase,),
    )
    tables = Tables.read(layout)
    verdict = decide(scenario, "toy", tables, failures=[evil("failure")])
    return (layout, scenario, tables, verdict), said


class Parsed(HTMLParser):
    """The text, the elements and the attributes of a page, and what was left open."""

    _VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        """Start with nothing."""
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.unclosed: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count an element."""
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self._VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count an element without content."""
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        """Check that it was the last one opened."""
        while self._open and self._open[-1] != tag:
            self.unclosed.append(self._open.pop())
        if self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        """Collect text, but not scripts and styles."""
        if not self._open or self._open[-1] not in ("script", "style"):
            self.text += data
