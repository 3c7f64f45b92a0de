"""A watched run and a bare run are the same bit for bit, in two real gloo ranks."""

from __future__ import annotations

import pytest

from tests.watched.invisible import CASES
from tests.watching import rank_files, torchrun

CONTROLS = ("draws_a_number", "writes_a_bit")
SAME = [name for name in CASES if name not in CONTROLS]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("invisible")
    ended = torchrun("-m", "tests.watched.invisible", out, ranks=2)
    assert ended.returncode == 0, ended.stderr
    return rank_files(out, 2)


@pytest.mark.parametrize("name", SAME)
def test_every_bit_is_the_same(results, name):
    for rank in results:
        case = rank[name]
        assert case["repeatable"], "the bare run must repeat itself for this to mean anything"
        assert case["same_names"]
        assert case["things"] > 20
        assert case["different"] == []


@pytest.mark.parametrize("name", SAME)
def test_it_was_watched_and_nothing_was_reported(results, name):
    for rank in results:
        case = rank[name]
        assert case["failed"] is None
        assert not case["found"]
        assert [one["updates"] for one in case["optimizers"]] == {
            "no_sync": [2],
            "two_models": [4, 4],
        }.get(name, [4])


def test_sharded_parameters_are_known_as_such(results):
    (one,) = results[0]["fully_shard"]["optimizers"]
    assert one["sharded"] == one["parameters"] == 6
    (other,) = results[0]["sgd_momentum"]["optimizers"]
    assert other["sharded"] == 0


def test_the_comparison_sees_a_clumsy_watcher(results):
    assert "torch" in results[0]["draws_a_number"]["different"]
    assert "model 0 module.embed.weight" in results[0]["writes_a_bit"]["different"]
