"""The words of the commands that are not Hydra's."""

from __future__ import annotations

import pytest

from harness.errors import UsageError
from launch import words
from launch.words import Help, Key, parse

KEYS = {
    "gpus": Key(about="numbers of ranks", read=words.wholes(1, 64), default=[4]),
    "seed": Key(about="of everything", read=words.whole(0), default=0),
    "dry_run": Key(about="start nothing", read=words.switched, default=False),
    "device": Key(about="where", read=words.one_of("auto", "cpu"), default="auto"),
    "run": Key(about="a run", read=words.text, needed=True),
}


def read(*argv):
    return parse([*argv, "run=x"], KEYS, "it")


def test_values_have_their_type_and_defaults_stand():
    assert read() == {"gpus": [4], "seed": 0, "dry_run": False, "device": "auto", "run": "x"}
    assert read("gpus=8,2,2", "seed=7", "dry_run=true")["gpus"] == [2, 8]


@pytest.mark.parametrize("typed", [["--seed=3"], ["--seed", "3"], ["seed=3"]])
def test_flags_mean_the_same_as_words(typed):
    assert read(*typed)["seed"] == 3


def test_a_switch_takes_no_value_from_the_next_word():
    assert read("--dry-run", "seed=3") == read("dry_run=true", "seed=3")


def test_an_empty_value_is_the_default():
    assert read("seed=")["seed"] == 0


def test_everything_wrong_is_said_at_once():
    with pytest.raises(UsageError) as error:
        parse(["gpu=4", "gpus=0", "seed=x", "dry_run=maybe", "device=cup", "4"], KEYS, "it")
    said = str(error.value)
    for part in ("nearest: gpus", "from 1 to 64", "not a whole number", "neither true", "run=..."):
        assert part in said, part
    assert "'4' is not key=value" in said
    assert "nearest: cpu" in said


def test_help_names_every_key():
    with pytest.raises(Help) as asked:
        parse(["--help"], KEYS, "it")
    assert [key for key in KEYS if f"{key}=" not in str(asked.value)] == []
