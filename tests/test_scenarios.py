"""Every scenario as data: YAML and dataclass fit, arms and claims are whole, checks are made."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import scenarios
from harness.parameters import build, violations
from harness.scenario import Outcome, Role, Scenario

CONF = Path(__file__).resolve().parent.parent / "conf" / "scenario"
HERE = scenarios.folders()[0]
NAMES = [name for name in scenarios.names() if (HERE / f"{name}.py").exists()]


def values(name: str) -> dict[str, object]:
    data = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def test_yaml_and_modules_are_one_to_one() -> None:
    assert sorted(path.stem for path in CONF.glob("*.yaml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_yaml_fits_the_parameters_and_comments_each(name: str) -> None:
    scenario = scenarios.load(name)
    assert violations(scenario.params, values(name)) == []
    for line in (CONF / f"{name}.yaml").read_text().splitlines():
        assert line.startswith("#") or not line.strip() or "#" in line, f"no comment: {line}"


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_is_whole(name: str) -> None:
    scenario = scenarios.load(name)
    assert isinstance(scenario, Scenario)
    assert len(scenario.title) <= 90
    roles = {arm.role for arm in scenario.arms}
    # Where only a belief is wrong there is no failing run to mend.
    assert (
        {Role.REFERENCE, Role.FAULTY, Role.FIXED} if scenario.cause else {Role.REFERENCE}
    ) <= roles
    assert len(scenario.arms) > 1
    assert len({arm.name for arm in scenario.arms}) == len(scenario.arms)
    assert len({claim.name for claim in scenario.claims}) == len(scenario.claims)
    assert all(claim.expects is not Outcome.UNKNOWN for claim in scenario.claims)
    texts = [claim.text for claim in scenario.claims]
    assert len(set(texts)) == len(texts)
    module = inspect.getmodule(scenario.run)
    assert all(callable(getattr(module, function)) for function in scenario.differs)


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_shared_by_so_many_ranks_is_refused_with_what_to_type(name: str) -> None:
    scenario = scenarios.load(name)
    given = values(name)
    assert not scenario.check(build(scenario.params, given), 2)
    said = scenario.check(build(scenario.params, given), 100_000)
    # Only a scenario whose arms are all of one process has nothing to share.
    assert bool(said) is any(arm.ranks != 1 for arm in scenario.arms)
    for sentence in said:
        typed = re.search(r"type scenario\.(\w+)=(\d+)", sentence)
        assert typed, sentence
        given[typed[1]] = int(typed[2])
    assert not scenario.check(build(scenario.params, given), 100_000)
