"""Names of parameters: the user's own, and the same on all ranks."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from harness.watch.modules import Modules


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, 3)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(3, 1))


NAMES = ["stem.weight", "stem.bias", "head.1.weight", "head.1.bias"]


@pytest.fixture
def modules():
    listening = Modules(lambda wrapped: None)
    yield listening
    listening.close()


def names(modules, parameters):
    parameters = list(parameters)
    known = modules.known(parameters)
    return [known[id(parameter)].name for parameter in parameters]


def test_modules_are_known_without_being_told(modules):
    net = Net()
    assert names(modules, net.parameters()) == NAMES


def test_modules_that_hold_none_of_them_do_not_change_the_names(modules):
    net = Net()
    other = torch.optim.swa_utils.AveragedModel(net)
    assert names(modules, net.parameters()) == NAMES
    holder = nn.Module()
    holder.inner = net
    del other
    assert names(modules, net.parameters()) == [f"inner.{name}" for name in NAMES]


def test_two_models_of_one_optimizer_have_titles(modules):
    first, second, third = Net(), Net(), nn.Sequential(nn.Linear(1, 1))
    found = names(modules, [first.stem.bias, second.stem.bias, third[0].bias])
    assert found == ["Net.stem.bias", "Net#2.stem.bias", "Sequential.0.bias"]


def test_names_of_wrappers_are_left_out(modules):
    net = Net()
    wrapped = nn.DataParallel(net)
    assert names(modules, wrapped.parameters()) == NAMES


def test_no_module_is_kept_alive(modules):
    net = Net()
    assert modules._parents
    del net
    gc.collect()
    assert not modules._parents


def test_modules_with_an_equality_of_their_own_do_no_harm(modules):
    class Odd(Net):
        def __hash__(self):
            return 1

        def __eq__(self, other):
            return True

    first, second = Odd(), Odd()
    found = names(modules, [first.stem.weight, second.stem.bias])
    assert found == ["Odd.stem.weight", "Odd#2.stem.bias"]
