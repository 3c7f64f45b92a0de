"""Runs that have ended, written by hand: what commands find that look at runs and start none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scenarios
from harness.plan import ArmPlan, Layout, Plan, write_text
from launch import newest


def ended(
    folder: Path,
    name: str,
    run: str,
    *,
    outcomes: Mapping[str, str] | None = None,
    numbers: Mapping[str, Mapping[str, Any]] | None = None,
    failures: Sequence[str] = (),
    params: Mapping[str, Any] | None = None,
    gpus: int = 2,
) -> Layout:
    """Write plan and verdict of a run; claims come out as expected but for `outcomes`."""
    scenario = scenarios.load(name)
    layout = Layout(folder / name / run)
    arms = tuple(
        ArmPlan(name=arm.name, ranks=arm.ranks or gpus, repeats=1, isolated=arm.isolated)
        for arm in scenario.arms
    )
    plan = Plan(
        run_id=run,
        scenario=name,
        params=newest.defaults(name) if params is None else params,
        arms=arms,
        world_size=gpus,
        device="cpu",
        backend="gloo",
        seed=0,
        engine="warm",
        collective_timeout_s=5.0,
        arm_timeout_s=60.0,
    )
    write_text(layout.plan, plan.to_json())
    findings = []
    agree = True
    for claim in scenario.claims:
        outcome = (outcomes or {}).get(claim.name, claim.expects.value)
        agree = agree and outcome == claim.expects.value
        item = {
            "claim": claim.name,
            "kind": claim.kind.value,
            "text": claim.text,
            "expects": claim.expects.value,
            "outcome": outcome,
            "reason": f"{claim.name} in {run}",
            "effect": None,
            "floor": None,
            "multiple": None,
            "unit": "",
            "evidence": {},
        }
        findings.append(item | dict((numbers or {}).get(claim.name, {})))
    sound = agree and not failures
    verdict = {
        "schema": 1,
        "run_id": run,
        "scenario": name,
        "conclusion": "as_expected" if sound else "inconclusive" if failures else "unexpected",
        "exit_code": 0 if sound else 11 if failures else 10,
        "headline": f"what {run} found",
        "findings": findings,
        "failures": list(failures),
    }
    write_text(layout.verdict, json.dumps(verdict))
    return layout
