"""Faults that one process has as well: what of them can be seen, and that it alarms nobody."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from harness.causes import Strength, catalogue, diagnose
from harness.causes.cause import Diagnosis
from harness.watch.evidence import Evidence
from harness.watch.instruments.loss_terms import of_probabilities, terms
from tests.test_watch_causes import evidence, update

ROWS = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.5, -0.5]])
IMAGE = torch.linspace(-1.0, 1.0, 24).reshape(2, 3, 2, 2)
LABELS = torch.tensor([2, 0])
PLACES = torch.tensor([[[0, 1], [2, 0]], [[1, 1], [0, 2]]])

TWICE = {
    "rows": lambda x: F.cross_entropy(x.softmax(dim=1), LABELS),
    "a module": lambda x: torch.nn.CrossEntropyLoss()(torch.nn.Softmax(dim=1)(x), LABELS),
    "cast in between": lambda x: F.cross_entropy(x.softmax(dim=1).double(), LABELS),
    "one term of two": lambda x: (
        0.5 * x.square().mean() + F.cross_entropy(x.softmax(1), LABELS) / 3
    ),
    "nll of log_softmax": lambda x: F.nll_loss(F.log_softmax(F.softmax(x, 1), 1), LABELS),
    "permuted": lambda x: F.cross_entropy(x.T.softmax(dim=0).T, LABELS),
}
ONCE = {
    "logits": lambda x: F.cross_entropy(x, LABELS),
    "log_softmax, the same twice as once": lambda x: F.cross_entropy(x.log_softmax(1), LABELS),
    "probabilities made logits again": lambda x: F.nll_loss(x.softmax(dim=1).log(), LABELS),
    "attention in the model": lambda x: F.cross_entropy(x.softmax(dim=1) @ x.T @ x, LABELS),
    "temperature": lambda x: F.cross_entropy(x.softmax(dim=1) * 10.0, LABELS),
    "squares of probabilities": lambda x: F.mse_loss(x.softmax(dim=1), x.detach()),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_softmax_right_before_a_cross_entropy_is_seen(name):
    assert of_probabilities(TWICE[name](ROWS.clone().requires_grad_()))


def test_so_it_is_of_pictures():
    x = IMAGE.clone().requires_grad_()
    assert of_probabilities(F.cross_entropy(x.softmax(dim=1), PLACES))
    assert not of_probabilities(F.cross_entropy(x, PLACES))


@pytest.mark.parametrize("name", ONCE)
def test_what_looks_like_it_is_not_taken_for_it(name):
    assert not of_probabilities(ONCE[name](ROWS.clone().requires_grad_()))


def test_a_loss_without_a_graph_says_nothing():
    assert not of_probabilities(F.cross_entropy(ROWS.softmax(dim=1), LABELS))


def test_reading_for_it_leaves_the_terms_as_they_are():
    x = ROWS.clone().requires_grad_()
    loss = F.cross_entropy(x.softmax(dim=1), LABELS)
    before = terms(loss)
    assert of_probabilities(loss)
    assert terms(loss) == before
    loss.backward()


def said(*events: dict[str, object]) -> list[Diagnosis]:
    found: Evidence = evidence(list(events))
    return [one for one in diagnose(found) if one.cause == "softmax_twice"]


def test_it_is_a_fact_and_explains_no_parting():
    (one,) = said(update(0), update(1, softmax_twice=[True]))
    assert one.strength is Strength.FACT
    assert not one.explains
    assert one.step == 1
    assert "softmax" in one.because[0]
    assert said(update(0), update(1)) == []


@pytest.mark.parametrize("name", ["eval_forgotten", "state_dict_aliased", "ignored_label_indexed"])
def test_what_correct_programs_do_on_purpose_is_never_said(name):
    given = evidence([update(0, softmax_twice=[True]), update(1)])
    assert catalogue()[name].diagnose(given) is None
