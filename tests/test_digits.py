"""Real data of scenarios: what is said where they are missing, and that the split never moves."""

from __future__ import annotations

import importlib.util

import pytest

import scenarios
from harness.errors import PrerequisiteError
from harness.parameters import build
from scenarios import _digits
from tests.test_scenarios import NAMES, values

WITH_DIGITS = [name for name in NAMES if values(name).get("scale") == "toy"]


@pytest.fixture
def without_sklearn(monkeypatch):
    found = importlib.util.find_spec

    def find_spec(name, *more):
        return None if name == "sklearn" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_some_scenarios_have_real_data():
    assert {"bn_shift", "double_softmax"} <= set(WITH_DIGITS)


@pytest.mark.usefixtures("without_sklearn")
@pytest.mark.parametrize("name", WITH_DIGITS)
def test_without_scikit_learn_real_data_are_refused_with_what_to_type(name):
    scenario, given = scenarios.load(name), values(name)

    assert list(scenario.check(build(scenario.params, given), 2)) == []
    with pytest.raises(PrerequisiteError, match=r"pip install scikit-learn.*scenario\.scale=toy"):
        scenario.check(build(scenario.params, given | {"scale": "real"}), 2)


@pytest.mark.usefixtures("without_sklearn")
def test_a_rank_without_scikit_learn_says_the_same():
    with pytest.raises(PrerequisiteError, match="not installed"):
        _digits.digits()


def test_the_split_is_the_same_for_every_seed_and_standardised():
    pytest.importorskip("sklearn", reason="needs scikit-learn, which is no requirement")
    import torch

    torch.manual_seed(1)
    one = _digits.digits()
    torch.manual_seed(2)
    two = _digits.digits()

    assert torch.equal(one.train_x, two.train_x)
    assert torch.equal(one.test_y, two.test_y)
    assert one.train_x.shape == (_digits.TRAIN, _digits.PIXELS)
    assert len(one.train_x) + len(one.test_x) == 1797
    assert torch.cat([one.train_y, one.test_y]).unique().tolist() == list(range(_digits.CLASSES))
    assert one.train_x.mean().abs() < 1e-12
    assert (one.train_x.std() - 1.0).abs() < 1e-12
    both = torch.cat([one.train_x, one.test_x])
    assert len(both.unique(dim=0)) == len(both), "a picture of the test is trained on"
