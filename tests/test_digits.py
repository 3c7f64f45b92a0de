"""Real data of scenarios: what is said where they are missing, and that the split never moves."""

from __future__ import annotations

import importlib.util

import pytest

import scenarios
from harness.errors import PrerequisiteError
from harness.parameters import build
from harness.rank import Rank
from scenarios import _digits, _models
from tests.launching import launch
from tests.test_scenarios import NAMES, values

WITH_DIGITS = [name for name in NAMES if values(name).get("scale") == "toy"]


@pytest.fixture
def without_sklearn(monkeypatch):
    found = importlib.util.find_spec

    def find_spec(name, *more):
        return None if name == "sklearn" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_some_scenarios_have_real_data():
    assert {"bn_shift", "double_softmax", "eval_padding", "metric_average"} <= set(WITH_DIGITS)


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


def a_rank(number, ranks, repeat=0):
    rank = Rank(
        rank=number,
        local_rank=number,
        world_size=ranks,
        device="cpu",
        backend="gloo",
        seed=3,
        collective_timeout_s=1.0,
        writer=None,
    )
    rank.repeat = repeat
    return rank


def pictures(x):
    return {tuple(row) for row in x.tolist()}


def test_the_ranks_share_real_rows_as_they_do_drawn_ones():
    pytest.importorskip("sklearn", reason="needs scikit-learn, which is no requirement")
    import torch

    x, y = _digits.rows(a_rank(0, 1), 24, "real")
    shares = [_digits.rows(a_rank(number, 3), 24, "real") for number in range(3)]
    assert x.shape == (24, _digits.PIXELS)
    assert y.shape == (24, _digits.CLASSES)
    assert torch.equal(y.sum(dim=1), torch.ones(24, dtype=torch.float64))
    assert len(pictures(x)) == 24
    for number, (part, classes) in enumerate(shares):
        assert torch.equal(part, x[number::3])
        assert torch.equal(classes, y[number::3])

    permuted, _ = _digits.rows(a_rank(0, 1, repeat=1), 24, "real")
    assert not torch.equal(permuted, x)
    assert pictures(permuted) == pictures(x)
    other, _ = _digits.rows(a_rank(0, 1), 24, "real", name="other")
    assert pictures(other) != pictures(x)

    held, _ = _digits.held_out(a_rank(0, 1), 600, "real")
    assert not pictures(held) & pictures(_digits.digits().train_x)
    assert torch.equal(held, _digits.held_out(a_rank(2, 3), 600, "real")[0])


def test_drawn_rows_are_those_of_other_scenarios():
    import torch

    rank = a_rank(1, 2)
    for ours, theirs in (
        (_digits.rows(rank, 8, "toy", name="a"), _models.rows(rank, 8, name="a")),
        (_digits.held_out(rank, 8, "toy"), _models.rows(rank, 8, name="held out", whole=True)),
    ):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert [len(q) for q in _digits.net(rank, "toy").parameters()] == [
        len(q) for q in _models.net(rank).parameters()
    ]


def test_right_is_the_largest_output_or_the_side_of_zero():
    import torch

    side = _digits.right(
        torch.tensor([[0.2], [0.2], [-3.0]]), torch.tensor([[1.0], [-1.0], [-1.0]])
    )
    largest = _digits.right(torch.eye(3)[[0, 2, 1]], torch.eye(3))
    assert side.tolist() == [True, False, True]
    assert largest.tolist() == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_DIGITS)
def test_real_data_find_what_is_expected(name, tmp_path):
    pytest.importorskip("sklearn", reason="needs scikit-learn, which is no requirement")
    given = (f"scenario={name}", "scenario.scale=real", "gpus=2", "seed=1", "device=cpu")
    run = launch(*given, results=tmp_path)

    assert run.code == 0, run.out
    assert run.verdict["conclusion"] == "as_expected"
    assert "undecided" not in run.verdict["headline"]
