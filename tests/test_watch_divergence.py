"""The first divergence, from digests alone: order, majority, replicas and parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.watch.answers import closing
from harness.watch.answers.answer import evidence, headline, who
from harness.watch.divergence import (
    begins_equal,
    differences,
    divergence,
    from_json,
    not_alike,
    rank_local,
    to_json,
)
from harness.watch.exit_codes import NOT_OBSERVED
from harness.watch.layout import GRADIENTS, PARAMETERS, START, Entry, index_of, place_of

NAMES = ("a", "b", "c")


def run(
    ranks=3,
    steps=3,
    *,
    wrapped=False,
    cohorts=None,
    start=None,
    grads=None,
    params=None,
    sampled=(),
    in_parts=None,
    groups=None,
    shape=(2,),
    zero=(),
    constant=(),
    methods=None,
):
    """Digests of a healthy run, then what was asked for: {(step, name, rank): digest}."""

    def entries(kind, rank):
        return tuple(
            Entry(
                name=name,
                kind=kind,
                shape=shape,
                dtype="float32",
                wrapped=wrapped,
                parts=(in_parts or {}).get(name, 0) if kind == "parameter" else 0,
                sampled=kind == "gradient" and name in sampled,
                cohort=(cohorts or {}).get((name, rank), ""),
                group=(groups or {}).get(rank, "") if name != "a" else "",
                method=(methods or {}).get(rank, ""),
                constant=name in (zero if kind == "gradient" else constant),
            )
            for name in NAMES
        )

    def look(index):
        step, phase = place_of(index)
        if step >= steps:
            return {}
        kind, changes = {
            START: ("parameter", start),
            GRADIENTS: ("gradient", grads),
            PARAMETERS: ("parameter", params),
        }[phase]
        return {
            rank: (
                entries(kind, rank),
                tuple((changes or {}).get((step, name, rank), 7) for name in NAMES),
            )
            for rank in range(ranks)
        }

    return look


def first(look, steps=3):
    for index in range(1 + 2 * steps):
        found = divergence(look, index)
        if found is not None:
            return found
    return None


def test_places_in_execution_order_are_one_to_one():
    places = [(0, START)] + [(s, p) for s in range(4) for p in (GRADIENTS, PARAMETERS)]
    assert [index_of(*place) for place in places] == list(range(9))
    assert [place_of(index) for index in range(9)] == places


def test_equal_digests_are_silent():
    assert first(run()) is None


def test_a_changed_parameter_is_found_in_its_step_with_its_rank():
    found = first(run(params={(1, "b", 2): 8, (2, "a", 2): 8, (2, "b", 2): 8}))
    assert (found.step, found.phase, found.ranks) == (1, PARAMETERS, (0, 1, 2))
    (one,) = found.differences
    assert (one.name, one.odd, one.groups) == ("b", (2,), ((0, 1), (2,)))
    assert headline(found).startswith("step 1: rank 2 differs from the others in parameter b,")


def test_what_the_update_was_made_from_comes_first():
    look = run(grads={(1, "b", 0): 8, (1, "c", 0): 8}, params={(1, "b", 0): 8, (1, "c", 0): 8})
    found = first(look)
    assert (found.step, found.phase) == (1, GRADIENTS)
    # Backward reaches the last layer first.
    assert [one.name for one in found.differences] == ["c", "b"]


def test_digests_that_are_made_otherwise_are_not_compared():
    apart = {(s, n, r): 9 for s in range(3) for n in NAMES for r in (2, 3)}
    methods = {2: "xxh3", 3: "xxh3"}
    how = {"ranks": 4, "start": apart}
    assert not_alike(run(**how, methods=methods)(0)) == (2, 3)
    assert not_alike(run(**how)(0)) == ()
    assert first(run(**how, params=apart)).phase == START
    how["grads"] = apart
    assert first(run(**how, params=apart, methods=methods)) is None
    found = first(run(**how, params=apart | {(1, "b", 3): 10}, methods=methods))
    assert (found.step, found.phase) == (1, PARAMETERS)
    assert [(one.name, one.groups) for one in found.differences] == [("b", ((2,), (3,)))]


def test_what_a_rank_lacks_is_missed_however_its_digests_are_made():
    entries = tuple(Entry(name=name, kind="parameter") for name in NAMES)
    others = tuple(Entry(name=name, kind="parameter", method="xxh3") for name in NAMES[:2])
    (one,) = differences({0: (entries, (1, 2, 3)), 1: (others, (4, 5))})
    assert (one.name, one.groups, one.structural) == ("c", ((0,), (1,)), True)


def test_gradients_that_the_optimizer_itself_reduces_are_no_fault():
    assert (
        first(run(grads={(s, n, r): r for s in range(3) for n in NAMES for r in range(3)})) is None
    )


def test_other_tensors_gradients_are_not_blamed():
    found = first(run(grads={(1, "a", 0): 8}, params={(1, "b", 0): 8}))
    assert (found.phase, [one.name for one in found.differences]) == (PARAMETERS, ["b"])


def test_the_answer_says_where_gradients_were_sampled_only():
    for sampled in (set(), {"a"}, {"b"}):
        look = run(params={(s, "b", 1): 8 for s in (1, 2)}, sampled=sampled)
        found = first(look)
        assert (found.step, found.phase, found.sampled) == (1, PARAMETERS, sampled == {"b"})
        assert ("where they were sampled" in evidence(found, source="x")[0]) == found.sampled
        assert from_json(to_json(found)) == found
    # Before the first update gradients are read in full.
    assert not first(run(params={(0, "b", 1): 8}, sampled={"b"})).sampled


@pytest.mark.parametrize(
    ("step", "since", "when"),
    [
        (7, None, "step 7:"),
        (9, None, "step 9:"),
        (11, 9, "step 9 to 11:"),
        (16, 13, "step 13 to 16:"),
        (30, 27, "step 27 to 30:"),
    ],
)
def test_of_what_is_read_in_parts_the_answer_says_since_when(step, since, when):
    changed = {(s, "b", 1): 8 for s in range(step, 33)}
    found = first(run(steps=33, params=changed, in_parts={"b": 4}), steps=33)
    assert (found.step, found.since) == (step, since)
    assert headline(found).startswith(when)
    assert ("read in parts" in evidence(found, source="x")[0]) == (since is not None)
    assert from_json(to_json(found)) == found
    # One that is read in full differs as well: it dates the others.
    both = changed | {(s, "a", 1): 8 for s in range(step, 33)}
    assert first(run(steps=33, params=both, in_parts={"b": 4}), steps=33).since is None
    assert first(run(steps=33, params=both, in_parts={"a": 16, "b": 4}), steps=33).since == since


def test_what_is_read_in_many_parts_may_be_older():
    look = run(steps=41, params={(40, "b", 1): 8}, in_parts={"b": 16})
    # All of it was read after update 32.
    assert first(look, steps=41).since == 33


def test_unequal_start_with_equal_gradients_is_a_fault():
    found = first(run(start={(0, "b", 1): 8}, params={(s, "b", 1): 9 for s in range(3)}))
    assert (found.step, found.phase, found.differences[0].odd) == (0, START, (1,))
    assert headline(found).startswith("before the first step: rank 1 differs")


def test_parts_are_not_replicas():
    changes = {(s, "b", r): r for s in range(3) for r in range(3)}
    look = run(start=changes, grads=changes, params=changes)
    assert first(look) is None
    assert rank_local(look) == {"b"}
    broken = run(start=changes, grads=changes, params=changes | {(2, "a", 1): 8})
    found = first(broken)
    assert (found.step, [one.name for one in found.differences]) == (2, ["a"])


def test_parts_below_a_layer_of_zeros_have_equal_gradients_once():
    start = {(0, "b", r): r for r in range(3)}
    weights = {(s, "b", r): 10 * s + r for s in range(3) for r in range(3)}
    later = {(s, "b", r): 10 * s + r for s in (1, 2) for r in range(3)}
    assert first(run(start=start, params=weights, grads=later, zero=["b"])) is None
    # The second gradients are equal as well: replicas, with gradients that were averaged.
    found = first(run(start=start, params=weights, zero=["b"]))
    assert (found.step, found.phase, found.differences[0].name) == (0, START, "b")
    # Equal and not zero in the first update: nothing has to be waited for.
    assert first(run(start=start, params=weights, grads=later)).phase == START


def test_parts_that_begin_with_zeros_are_parts_of_a_layer():
    """The second matrix of two that are divided among ranks, next to a first one that is known."""
    start = {(0, "a", r): r for r in range(3)}
    parts = {(s, name, r): 10 * s + r for s in range(3) for name in "ab" for r in range(3)}

    def train(**options):
        return first(run(start=start, grads=parts, params=parts, **options))

    assert train(constant=["b"], shape=(2, 2)) is None
    # A bias, or a matrix that was drawn and is the same on all ranks, is a replica.
    assert train(constant=["b"]).differences[0].name == "b"
    assert train(shape=(2, 2)).differences[0].name == "b"


def test_below_a_wrapper_unequal_starts_are_a_fault_whatever_the_gradients():
    changes = {(0, "b", r): r for r in range(3)}
    found = first(run(wrapped=True, start=changes, grads=changes))
    assert (found.phase, found.differences[0].name) == (START, "b")


GROUPS = {0: "0 1", 1: "0 1", 2: "2 3", 3: "2 3"}


def test_models_of_groups_are_compared_within_their_groups_only():
    usual = {"ranks": 4, "wrapped": True, "groups": GROUPS}
    # What begins with the same values on all ranks, such as a scale of ones, is a part of it.
    start = {(0, "b", r): r // 2 for r in range(4)}
    later = {(s, n, r): r // 2 for s in range(3) for n in "bc" for r in range(4)}
    assert first(run(**usual, start=start, grads=later, params=later)) is None
    found = first(run(**usual, start=start, grads=later, params=later | {(1, "c", 3): 9}))
    assert (found.step, found.phase) == (1, PARAMETERS)
    assert found.differences[0].groups == ((2,), (3,))
    # The wrapper over all ranks is compared on all of them.
    other = run(**usual, start=start, grads=later, params=later | {(2, "a", 0): 9})
    assert (first(other).step, first(other).differences[0].odd) == (2, (0,))
    # Unequal within a group as well: these are no models of groups.
    mixed = {(0, "b", r): r for r in range(4)}
    assert first(run(**usual, start=mixed, grads=later, params=later)).phase == START
    # Equal everywhere: replicas whose wrapper was given a group too small.
    assert first(run(**usual, grads=later, params=later)).phase == GRADIENTS


def test_parameters_that_begin_equal_on_all_ranks():
    assert begins_equal(run(), (0, 1, 2))
    assert not begins_equal(run(start={(0, "b", 1): 8}), (0, 1, 2))
    # One of them has not come so far.
    assert not begins_equal(run(), (0, 1, 2, 3))


def test_shards_are_never_compared_with_other_shards_but_with_their_replicas():
    # Two ranks hold part 0 and two hold part 1.
    cohorts = {("b", rank): f"part {rank // 2}" for rank in range(4)}
    changes = {(s, "b", r): r // 2 for s in range(3) for r in range(4)}
    everywhere = {"start": changes, "grads": changes, "cohorts": cohorts, "ranks": 4}
    assert first(run(**everywhere, params=changes)) is None
    found = first(run(**everywhere, params=changes | {(1, "b", 3): 9}))
    assert found.step == 1
    assert found.differences[0].groups == ((2,), (3,))


@pytest.mark.parametrize(
    ("digests", "odd", "says"),
    [
        ((7, 7, 8), (2,), "rank 2 differs from the others"),
        ((8, 7, 9, 7, 7), (0, 2), "ranks 0 and 2 differ from the others"),
        ((7, 8), (), "ranks 0 and 1 differ"),
        ((7, 8, 9), (), "all ranks differ from each other"),
        ((7, 7, 8, 8), (), "no majority: ranks 0 and 1, ranks 2 and 3 differ"),
    ],
)
def test_the_odd_rank_needs_a_majority(digests, odd, says):
    entry = (Entry(name="a", kind="parameter", shape=(1,)),)
    (one,) = differences({rank: (entry, (digest,)) for rank, digest in enumerate(digests)})
    assert one.odd == odd
    assert who(one) == says


def test_order_of_registration_does_not_matter_but_names_do():
    a, b = (Entry(name=n, kind="parameter", shape=(1,), wrapped=True) for n in "ab")
    assert differences({0: ((a, b), (1, 2)), 1: ((b, a), (2, 1))}) == []
    found = differences({0: ((a, b), (1, 2)), 1: ((b, a), (1, 2))})
    assert [one.name for one in found] == ["a", "b"]


def test_what_a_rank_lacks_is_a_difference_and_not_agreement():
    a, b = (Entry(name=n, kind="parameter", shape=(1,)) for n in "ab")
    (one,) = differences({0: ((a, b), (1, 2)), 1: ((a,), (1,)), 2: ((a, b), (1, 2))})
    assert (one.name, one.structural, one.odd) == ("b", True, (1,))


def test_a_divergence_survives_json():
    found = first(run(grads={(1, "b", 0): 8}, params={(1, "b", 0): 8}))
    assert from_json(to_json(found)) == found


def test_where_each_rank_has_layers_of_its_own_nothing_is_replicated():
    def look(index):
        kind = "gradient" if place_of(index)[1] == GRADIENTS else "parameter"
        return {
            rank: (
                tuple(Entry(name=n, kind=kind, shape=(2,), dtype="float32") for n in names),
                (7, 7),
            )
            for rank, names in enumerate((("stage0.a", "stage0.b"), ("stage1.a", "stage1.b")))
        }

    updates = SimpleNamespace(exchange_of=lambda _: SimpleNamespace(look=look))
    watcher = SimpleNamespace(world_size=2, peers=[0, 1], rank=0, updates=updates)
    ends = {
        rank: {"failed": None, "optimizers": [{"updates": 3, "parameters": 2, "sharded": 0}]}
        for rank in (0, 1)
    }
    notes = []
    code, said = closing._nothing_found(watcher, ends, notes)
    assert (code, said) == (NOT_OBSERVED, "could not observe: no parameter is replicated")
    assert notes[0].startswith("4 parameters were not compared")


def test_where_all_is_sharded_nothing_is_called_replicated():
    updates = SimpleNamespace(exchange_of=lambda _: SimpleNamespace(look=lambda _: {}))
    watcher = SimpleNamespace(world_size=2, peers=[0, 1], rank=0, updates=updates)
    one = {"updates": 3, "parameters": 2, "sharded": 2}
    ends = {rank: {"failed": None, "optimizers": [one]} for rank in (0, 1)}
    said = closing._nothing_found(watcher, ends, [])[1]
    assert said == "no divergence: 2 sharded parameters and no replicated one, 3 updates, 2 ranks"
    one["sharded"] = 1
    said = closing._nothing_found(watcher, ends, [])[1]
    assert said == "no divergence: 1 replicated parameter, 3 updates, 2 ranks"
