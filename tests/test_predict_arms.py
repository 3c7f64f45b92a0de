"""Which arms end with other weights than the reference: asked, read from records, and scored."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import replace

import pytest

import scenarios
from harness.errors import UsageError
from harness.floor import PERMUTATIONS
from launch.predict import answers, arms, report, session
from launch.predict.answers import Answer
from launch.predict.asking import ask
from launch.predict.history import Sitting
from launch.predict.session import Found
from tests import streams
from tests.test_predict import NAMES, RATES, Asked, question, topic

KNOWN = "ddp_forward_bypassed"
ASKED = arms.asked(scenarios.load(KNOWN))


def test_arms_are_asked_for_where_their_weights_are_recorded_and_nowhere_else():
    with_arms = {name: arms.asked(scenarios.load(name)) for name in NAMES}
    assert sum(map(bool, with_arms.values())) > 40
    assert with_arms["profiler_memory"] == ()
    for name, asked in with_arms.items():
        scenario = scenarios.load(name)
        first = arms.reference(scenario)
        assert first is None or first.name not in asked
        assert not any(scenario.arm(arm).isolated for arm in asked)
        assert len(asked) != 1


def test_a_set_is_scored_against_a_coin_for_each_arm():
    for truth in itertools.product((False, True), repeat=4):
        found = dict(zip("abcd", truth, strict=True))
        guesses = [
            [name for name, inside in zip("abcd", said, strict=True) if inside]
            for said in itertools.product((False, True), repeat=4)
        ]
        skills = [arms.skill(said, found) for said in guesses]
        assert statistics.fmean(skills) == pytest.approx(0.0)
        right = [name for name, apart in found.items() if apart]
        assert arms.skill(right, found) == 1.0
        assert (
            max(skill for said, skill in zip(guesses, skills, strict=True) if said != right) < 1.0
        )


def test_arms_that_could_not_be_compared_count_for_neither():
    found = {"a": True, "b": False}
    assert arms.skill(["a", "gone"], found) == arms.skill(["a"], found) == 1.0
    assert arms.skill(["a"], {"a": True}) is None
    assert arms.skill([], {}) is None


@pytest.mark.parametrize(
    ("words", "said"), [("", None), ("none", ()), ("0", ()), ("b, a b", ("b", "a"))]
)
def test_arms_are_typed_by_name(words, said):
    assert arms.typed(words, ("a", "b")) == said


def test_an_arm_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no arm 'bypased'.*bypassed"):
        arms.typed("bypased", ASKED)


def recorded(tmp_path, moved, *, repeats=PERMUTATIONS + 1, **others):
    """Write a run of KNOWN: permuted repeats of the reference, and each arm's value by rank."""
    scenario = scenarios.load(KNOWN)
    first = arms.reference(scenario).name
    rows = [row(first, 0, moved if repeat else 0.0, repeat) for repeat in range(repeats)]
    for arm, by_rank in others.items():
        rows += [row(arm, rank, gap, 0) for rank, gap in enumerate(by_rank)]
    ranks = {first: 1} | {arm: len(by_rank) for arm, by_rank in others.items()}
    plan = streams.plan(ranks, repeats={first: repeats}, scenario=KNOWN)
    return arms.differing(streams.write(tmp_path, plan, rows), scenario)


def row(arm, rank, gap, repeat):
    value = [0.1, 0.3 + gap]
    cells = {"weights.digest": str(value)}
    return arm, rank, {"repeat": repeat, "metrics": cells, "tensors": {"weights": value}}


def test_an_arm_differs_if_any_rank_is_off_by_more_than_rounding(tmp_path):
    one, two, *_ = ASKED
    rounded, off = (0.0, 3e-16), (0.0, 1e-6)
    assert recorded(tmp_path / "a", 1e-16, **{one: rounded, two: off}) == {one: False, two: True}
    assert recorded(tmp_path / "b", 1e-16, **{one: off, two: rounded}) == {one: True, two: False}
    # The same gap is rounding where rounding moves as much.
    assert recorded(tmp_path / "c", 1e-6, **{one: off}) == {one: False}
    assert recorded(tmp_path / "d", 1e-16, **{one: (math.nan, 0.0)}) == {one: True}


def test_without_permuted_repeats_half_the_digits_decide(tmp_path):
    one, two, *_ = ASKED
    gaps = {one: (1e-12, 0.0), two: (1e-6, 0.0)}
    assert recorded(tmp_path, 0.0, repeats=1, **gaps) == {one: False, two: True}


def test_an_arm_that_was_not_through_is_left_out(tmp_path):
    scenario = scenarios.load(KNOWN)
    first, (one, two, *_) = arms.reference(scenario).name, ASKED
    plan = streams.plan({first: 1, one: 2, two: 2}, scenario=KNOWN)
    rows = [row(first, 0, 0.0, 0), *(row(arm, r, 0.0, 0) for arm in (one, two) for r in (0, 1))]
    layout = streams.write(tmp_path, plan, rows, ends={(one, 1): "failed"})
    assert arms.differing(layout, scenario) == {two: False}


def test_a_file_names_arms_and_says_what_is_none(tmp_path):
    path, key = tmp_path / "answers.json", topic(KNOWN).key
    path.write_text(json.dumps({"answers": {key: {"holds": 1, "differ": [ASKED[0]]}}}))
    read = answers.read(path, RATES, [key])(topic(KNOWN))
    assert read.differ == (ASKED[0],)
    arms.check(read.differ, topic(KNOWN))
    with pytest.raises(UsageError, match=rf"no arm 'healty'[^\n]*\nlegal: {ASKED[0]}"):
        arms.check(("healty",), topic(KNOWN))
    path.write_text(json.dumps({"answers": {key: {"holds": 1, "differ": "all"}}}))
    with pytest.raises(UsageError, match="a list of arms"):
        answers.read(path, RATES, [key])


def test_somebody_is_asked_and_wrong_names_are_asked_for_again():
    asked = replace(question(), topic=topic(KNOWN))
    out = Asked("h", "nobody", ASKED[0])
    given = ask(out, 1, [asked], RATES, None)
    assert given.differ == (ASKED[0],)
    assert "no arm 'nobody'" in out.export_text()
    assert ask(Asked("h", ""), 1, [asked], RATES, None).differ is None


def test_verdict_number_and_arms_count_alike(tmp_path):
    found = Found(
        outcome="holds",
        reason="",
        effect=0.5,
        run=None,
        sealed=None,
        differ={"a": True, "b": False},
    )
    said = Answer(probabilities={"refuted": 1.0}, interval=(0.1, 1.0), differ=("a",))

    item = session.item(question(), said, found, RATES, [])
    assert item.arms_skill == 1.0
    assert item.skill == pytest.approx((item.verdict_skill + item.number_skill + 1.0) / 3)
    silent = session.item(question(), replace(said, differ=None), found, RATES, [])
    assert silent.arms_skill is None
    assert silent.skill == pytest.approx((item.verdict_skill + item.number_skill) / 2)
    left_open = session.item(question(), said, replace(found, outcome="unknown"), RATES, [])
    assert left_open.skill is None
    assert left_open.arms_skill is None

    out = Asked()
    sitting = Sitting(date="d", player="p", draw=1, items=(item,))
    report.show(out, [question()], sitting, [found], [sitting], tmp_path)
    assert "arms that differ: a  you: a" in out.export_text()
