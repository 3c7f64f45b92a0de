"""Each shared decision can say holds, refuted and unknown, and what is missing is never a pass."""

from __future__ import annotations

import dataclasses
import math

import pytest

import scenarios
from harness.arms import control, faulty, fixed, one_process, reference
from harness.claims import HOLDS, REFUTED, cost, mechanism, remedy, symptom
from harness.errors import MissingRecord
from harness.findings import (
    all_of,
    counts,
    is_rounding,
    like_one_process,
    matches,
    mean_exceeds,
    mean_is,
    negated,
    ranks_agree,
    repeats_records,
    same_by_rank,
    says,
    stands_still,
)
from harness.floor import dtype_floor
from harness.scenario import Kind, Outcome, Role, holds, refuted, unknown
from harness.tables import Tables
from tests import streams

UNKNOWN = Outcome.UNKNOWN
ONE = 1e-16
"""The floor of the runs below: no permuted repeat moves the reference by more."""


def tables(tmp_path, arms, rows, **options):
    layout = streams.write(tmp_path, streams.plan(arms, **options), rows)
    return Tables.read(layout)


def held(arm, rank, step, digest, *values, repeat=0):
    """Return a snapshot `w`, as a rank would have recorded it."""
    metrics = {"w.digest": digest}
    return (
        arm,
        rank,
        {"repeat": repeat, "step": step, "metrics": metrics, "tensors": {"w": list(values)}},
    )


def against_one_process(tmp_path, *gaps, repeats=21, moved=ONE):
    """Write a reference at (1, 0) with permuted repeats, and an arm at these distances from it."""
    rows = [held("one_process", 0, 0, "start", 0.5, 0.0)]
    rows += [
        held("one_process", 0, 3, f"r{repeat}", 1.0, moved if repeat else 0.0, repeat=repeat)
        for repeat in range(repeats)
    ]
    for rank, gap in enumerate(gaps):
        rows.append(held("many", rank, 0, "start", 0.5, 0.0))
        rows.append(held("many", rank, 3, f"gap {gap}", 1.0, gap))
    ranks = {"one_process": 1, "many": len(gaps)}
    return tables(tmp_path, ranks, rows, repeats={"one_process": repeats})


@pytest.mark.parametrize(
    ("gaps", "outcome"),
    [
        ((0.0, 0.0), HOLDS),
        ((0.0, 4 * ONE), HOLDS),
        ((0.0, 5 * ONE), UNKNOWN),
        ((99 * ONE, 0.0), UNKNOWN),
        ((101 * ONE, 0.0), REFUTED),
        ((0.0, 1.0), REFUTED),
        ((math.nan, 0.0), REFUTED),
        ((0.0, math.nan), REFUTED),
    ],
)
def test_matches_takes_the_rank_that_is_furthest_off(tmp_path, gaps, outcome):
    finding = matches(against_one_process(tmp_path, *gaps), "many", "one_process", "w")

    assert finding.outcome is outcome
    assert finding.floor == pytest.approx(ONE)
    assert finding.evidence["step"] == 3


@pytest.mark.parametrize("options", [{"repeats": 20}, {"moved": 0.0}, {"moved": math.inf}])
def test_matches_needs_a_floor(tmp_path, options):
    t = against_one_process(tmp_path, 0.0, 0.0, **options)

    with pytest.raises(MissingRecord):
        matches(t, "many", "one_process", "w")


def test_matches_can_look_at_an_earlier_step(tmp_path):
    t = against_one_process(tmp_path, 0.0, 1.0)

    with pytest.raises(MissingRecord, match="repeat 1"):
        matches(t, "many", "one_process", "w", step=0)


def test_matches_can_ask_for_a_multiple(tmp_path):
    rows = [
        held("one_process", 0, 3, f"r{repeat}", 1.0, ONE if repeat else 0.0, repeat=repeat)
        for repeat in range(21)
    ]
    rows += [held("many", rank, 3, "three", 3.0, 0.0) for rank in range(2)]
    t = tables(tmp_path, {"one_process": 1, "many": 2}, rows, repeats={"one_process": 21})

    assert matches(t, "many", "one_process", "w", times=3).outcome is HOLDS
    assert matches(t, "many", "one_process", "w", times=2).outcome is REFUTED
    assert matches(t, "many", "one_process", "w").outcome is REFUTED


def test_like_one_process_wants_one_tensor_on_all_ranks_too(tmp_path):
    same = against_one_process(tmp_path / "same", ONE, ONE)
    apart = against_one_process(tmp_path / "apart", ONE, 2 * ONE)
    wrong = against_one_process(tmp_path / "wrong", 1.0, 1.0)

    assert like_one_process(same, "many", "w").outcome is HOLDS
    assert like_one_process(apart, "many", "w").outcome is REFUTED
    assert like_one_process(wrong, "many", "w").outcome is REFUTED


def of_two_ranks(tmp_path, first, second, *, arm="many", **more):
    """Write the digests of two ranks, step by step; None = not recorded."""
    rows = [
        held(arm, rank, step, digest, 1.0)
        for rank, digests in enumerate((first, second))
        for step, digest in enumerate(digests)
        if digest is not None
    ]
    rows += [
        held(name, 0, step, digest, 1.0)
        for name, digests in more.items()
        for step, digest in enumerate(digests)
        if digest is not None
    ]
    return tables(tmp_path, {arm: 2, **dict.fromkeys(more, 1)}, rows)


@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        ("abc", "abc", HOLDS),
        ("abc", "abd", REFUTED),
        ("abc", "acb", REFUTED),
        ("aaa", "aaa", UNKNOWN),
        ("aaa", "bbb", REFUTED),
        ("a", "a", HOLDS),
    ],
)
def test_ranks_agree(tmp_path, first, second, outcome):
    assert ranks_agree(of_two_ranks(tmp_path, first, second), "many", "w").outcome is outcome


def test_ranks_agree_names_the_first_place(tmp_path):
    finding = ranks_agree(of_two_ranks(tmp_path, "abcd", "abxy"), "many", "w")

    assert (finding.evidence["first_step"], finding.evidence["first_rank"]) == (2, 1)


def test_a_value_that_may_stand_still_agrees(tmp_path):
    t = of_two_ranks(tmp_path, "aaa", "aaa")

    assert ranks_agree(t, "many", "w", moving=False).outcome is HOLDS


@pytest.mark.parametrize(("first", "second"), [(("a", None), "ab"), ("ab", ("a", None)), ("", "")])
def test_ranks_agree_misses_what_one_rank_lacks(tmp_path, first, second):
    with pytest.raises(MissingRecord):
        ranks_agree(of_two_ranks(tmp_path, first, second), "many", "w")


def test_one_rank_agrees_with_nobody(tmp_path):
    t = tables(tmp_path, {"alone": 1}, [held("alone", 0, 0, "a", 1.0)])

    assert ranks_agree(t, "alone", "w").outcome is UNKNOWN


@pytest.mark.parametrize(
    ("many", "other", "outcome"),
    [("aaa", "abc", HOLDS), ("aab", "abc", REFUTED), ("aaa", "aaa", UNKNOWN)],
)
def test_stands_still(tmp_path, many, other, outcome):
    t = of_two_ranks(tmp_path, "aaa", many, other=other)

    assert stands_still(t, "many", "other", "w").outcome is outcome


@pytest.mark.parametrize(
    ("second", "outcome"), [("abc", HOLDS), ("abx", REFUTED), ("xbc", REFUTED)]
)
def test_repeats_records(tmp_path, second, outcome):
    t = of_two_ranks(tmp_path, "abc", second, other="abc")

    assert repeats_records(t, "many", "other", "w").outcome is outcome


@pytest.mark.parametrize(("second", "other"), [("ab", "abc"), ("abc", "ab")])
def test_repeats_records_misses_a_step(tmp_path, second, other):
    with pytest.raises(MissingRecord):
        repeats_records(of_two_ranks(tmp_path, other, second, other=other), "many", "other", "w")


def counted(tmp_path, *values):
    rows = [("many", r, {"step": 1, "metrics": {"n": n}}) for r, n in enumerate(values)]
    return tables(tmp_path, {"many": len(values)}, rows)


@pytest.mark.parametrize(
    ("second", "outcome"), [((1.0, 2.0), HOLDS), ((1.0, 2.5), REFUTED), ((2.0, 1.0), REFUTED)]
)
def test_same_by_rank_compares_each_with_its_like(tmp_path, second, outcome):
    rows = [
        (arm, rank, {"repeat": 0, "step": 0, "metrics": {"loss": value}, "tensors": {}})
        for arm, values in (("one", second), ("other", (1.0, 2.0)))
        for rank, value in enumerate(values)
    ]
    t = tables(tmp_path, {"one": 2, "other": 2}, rows)

    assert same_by_rank(t, "one", "other", "loss").outcome is outcome
    with pytest.raises(MissingRecord):
        same_by_rank(t, "one", "other", "loss", step=1)


@pytest.mark.parametrize(
    ("values", "outcome"),
    [((2, 2), HOLDS), ((2, 3), REFUTED), ((3, 2), REFUTED), ((0, 0), REFUTED)],
)
def test_counts_are_exact_on_every_rank(tmp_path, values, outcome):
    finding = counts(counted(tmp_path, *values), "many", "n", 2, "calls")

    assert finding.outcome is outcome
    assert finding.evidence["expected"] == 2


def test_counts_misses_what_was_not_counted(tmp_path):
    with pytest.raises(MissingRecord):
        counts(counted(tmp_path, 2, 2), "many", "m", 2, "calls")


@pytest.mark.parametrize(
    "decide",
    [
        lambda t: ranks_agree(t, "many", "w"),
        lambda t: stands_still(t, "many", "other", "w"),
        lambda t: repeats_records(t, "many", "other", "w"),
        lambda t: matches(t, "many", "other", "w"),
        lambda t: counts(t, "many", "n", 1, "calls"),
    ],
)
@pytest.mark.parametrize("end", [None, "failed"])
def test_a_rank_that_never_came_to_its_end_decides_nothing(tmp_path, decide, end):
    rows = [held("many", rank, step, "ab"[step], 1.0) for rank in (0, 1) for step in (0, 1)]
    rows += [held("other", 0, step, "ab"[step], 1.0) for step in (0, 1)]
    rows += [("many", rank, {"step": 1, "metrics": {"n": 1}}) for rank in (0, 1)]
    plan = streams.plan({"many": 2, "other": 1})
    t = Tables.read(streams.write(tmp_path, plan, rows, ends={("many", 1): end}))

    with pytest.raises(MissingRecord, match="rank 1"):
        decide(t)


@pytest.mark.parametrize(
    ("expected", "outcome"),
    [(2.0, HOLDS), (3.99, HOLDS), (4.01, UNKNOWN), (5.99, UNKNOWN), (6.01, REFUTED)],
)
def test_mean_is_counts_in_standard_errors(expected, outcome):
    # Mean 2, variance 1, four values: a standard error of 0.5.
    off = math.sqrt(3) / 2
    values = [2 - off, 2 - off, 2 + off, 2 + off]

    finding = mean_is(values, expected, "x")

    assert finding.floor == pytest.approx(0.5)
    assert finding.outcome is outcome


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan]])
def test_mean_is_needs_values(values):
    assert mean_is(values, 1.0, "x").outcome is UNKNOWN


@pytest.mark.parametrize(
    ("bound", "outcome"),
    [
        (-2.01, HOLDS),
        (-1.99, UNKNOWN),
        (-0.01, UNKNOWN),
        (0.01, REFUTED),
        (2.0, REFUTED),
        (5.0, REFUTED),
        (9.0, REFUTED),
    ],
)
def test_mean_exceeds_only_where_it_is_clearly_above(bound, outcome):
    # Mean 2 and a standard error of 0.5, as above.
    off = math.sqrt(3) / 2

    finding = mean_exceeds([2 - off, 2 - off, 2 + off, 2 + off], bound, "x")

    assert finding.outcome is outcome
    assert ("too near" in finding.reason) is (outcome is UNKNOWN)


@pytest.mark.parametrize(("value", "outcome"), [(1.0, REFUTED), (1.5, HOLDS), (0.5, REFUTED)])
def test_mean_exceeds_of_values_that_are_all_one(value, outcome):
    assert mean_exceeds([value] * 8, 1.0, "x").outcome is outcome


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan]])
def test_mean_exceeds_needs_values(values):
    assert mean_exceeds(values, 0.0, "x").outcome is UNKNOWN


@pytest.mark.parametrize(
    ("effect", "outcome"),
    [(0.0, HOLDS), (4.0, HOLDS), (4.1, UNKNOWN), (99.0, UNKNOWN), (100.0, REFUTED)],
)
def test_is_rounding(effect, outcome):
    assert is_rounding(effect, dtype_floor(1.0), "so", "units").outcome is outcome


YES, NO, OPEN = holds("yes", effect=1.0), refuted("no"), unknown("open")


def test_negated():
    assert [negated(f).outcome for f in (YES, NO, OPEN)] == [REFUTED, HOLDS, UNKNOWN]
    assert (negated(YES).reason, negated(YES).effect) == ("yes", 1.0)


@pytest.mark.parametrize(
    ("findings", "decides"),
    [((YES, NO, OPEN), NO), ((OPEN, NO), NO), ((YES, OPEN), OPEN), ((OPEN, YES), OPEN)],
)
def test_all_of_is_decided_by_the_worst(findings, decides):
    assert all_of(*findings) is decides


def test_all_of_keeps_every_reason_and_the_first_number():
    found = all_of(holds("a", evidence={"n": 1}), holds("b", effect=2.0, evidence={"n": 2, "m": 3}))

    assert (found.outcome, found.reason, found.effect) == (HOLDS, "a; b", 2.0)
    assert found.evidence == {"n": 1, "m": 3}


def test_a_headline_says_what_was_found():
    headline = says(one_thing=("true", "false"), another=("yes", "no"))

    assert headline({"one_thing": YES, "another": NO}) == "true; no"
    assert headline({"one_thing": OPEN, "another": YES}) == "undecided: one thing; yes"


@pytest.mark.parametrize(
    ("decorator", "kind"),
    [
        (symptom, Kind.SYMPTOM),
        (mechanism, Kind.MECHANISM),
        (remedy, Kind.REMEDY),
        (cost, Kind.COST),
    ],
)
def test_a_claim_is_a_judge_with_a_sentence(decorator, kind):
    @decorator(REFUTED, source="owner/name#1")
    def it_rains(t):
        """It rains, and
        it pours.
        """
        return YES

    assert (it_rains.name, it_rains.kind, it_rains.expects) == ("it_rains", kind, REFUTED)
    assert (it_rains.text, it_rains.source) == ("It rains, and it pours.", "owner/name#1")
    assert it_rains.judge(None) is YES


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ("2.9.0", REFUTED),
        ("2.9.1+cu128", REFUTED),
        ("2.10.0", HOLDS),
        ("2.10.2", HOLDS),
        ("2.11.0a0+git0123456", REFUTED),
        ("3.0.0", REFUTED),
    ],
)
def test_what_is_expected_follows_torch_where_torch_has_changed(torch, expected):
    @symptom(REFUTED, before={"2.11": HOLDS, "2.10": REFUTED})
    def it_rains(t):
        """It rains."""
        return YES

    @symptom(HOLDS)
    def it_snows(t):
        """It snows."""
        return YES

    scenario = scenarios.load("loss_gap")
    weather = dataclasses.replace(scenario, claims=(it_rains, it_snows))
    assert [claim.expects for claim in weather.on(torch).claims] == [expected, HOLDS]
    assert weather.on(None) is weather
    assert scenario.on(torch) is scenario


def test_a_claim_without_a_sentence_is_none():
    with pytest.raises(AssertionError, match="silent has no docstring"):

        @symptom(HOLDS)
        def silent(t):
            return YES


def test_arms_tell_places_from_options():
    alone = one_process("alone", mode="x")
    hangs = faulty("hangs", "hangs", isolated=True, mode="y")

    assert (alone.name, alone.role, alone.ranks) == ("one_process", Role.REFERENCE, 1)
    assert (alone.repeats, dict(alone.options)) == ("permutations", {"mode": "x"})
    assert (hangs.role, hangs.isolated, hangs.ranks) == (Role.FAULTY, True, None)
    assert dict(hangs.options) == {"mode": "y"}
    roles = [make("a", "b").role for make in (reference, faulty, fixed, control)]
    assert roles == [Role.REFERENCE, Role.FAULTY, Role.FIXED, Role.CONTROL]
