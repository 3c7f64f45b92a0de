"""Places that share no folder are compared over a store: a real one, and rings of real files."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from harness.watch.divergence import divergence
from harness.watch.layout import GRADIENTS, PARAMETERS, START, Entry, Layout, index_of
from harness.watch.meeting import alarms
from harness.watch.meeting import bridge as bridges
from harness.watch.meeting.alarms import Alarms
from harness.watch.meeting.board import Board
from harness.watch.meeting.bridge import Bridge
from harness.watch.meeting.bundle import bundle, lay_out
from harness.watch.meeting.crossing import KEYS, Crossing, Progress
from harness.watch.meeting.exchange import Exchange
from harness.watch.meeting.folder import Folder
from harness.watch.meeting.places import Places

STREAM = "optimizer0"
PATIENCE = timedelta(seconds=5)


@pytest.fixture
def store():
    made = None
    while made is None:
        # A connection that is never answered happens, to the server's own as well.
        with contextlib.suppress(RuntimeError):
            made = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
    yield made
    del made


def layout(names, cohort="", method=""):
    def entries(kind):
        return tuple(
            Entry(name=name, kind=kind, shape=(2,), dtype="float32", cohort=cohort, method=method)
            for name in names
        )

    lr = Entry(name="param_groups[0]['lr']", kind="setting", values=True)
    return Layout(
        {
            START: entries("parameter"),
            GRADIENTS: (lr, *entries("gradient")),
            PARAMETERS: entries("parameter"),
        }
    )


class Place:
    """The ranks of one folder, and their way to the others."""

    def __init__(
        self, tmp_path, store, name, ranks, places, names=("a", "b"), cohorts=None, method=""
    ):
        root = tmp_path / name
        root.mkdir()
        self.folder, self.ranks, self.names = Folder(root), ranks, names
        self.writers = {rank: Exchange(self.folder, STREAM, ranks) for rank in ranks}
        for rank, writer in self.writers.items():
            assert writer.declare(rank, layout(names, (cohorts or {}).get(rank, ""), method))
        exchange = Exchange(self.folder, STREAM, ranks)
        board = Board(store, "test")
        self.crossing = Crossing(board, exchange, STREAM, ranks, places, name, Progress())

    def write(self, step, phase, values=None, lr=1):
        for rank, writer in self.writers.items():
            digests = [(values or {}).get((rank, name), 100 * step + 7) for name in self.names]
            setting = [lr] if phase == GRADIENTS else []
            writer.post(index_of(step, phase), [*setting, *digests])

    def go(self, last):
        self.crossing.catch_up(last)
        self.crossing.look_out()


def update(places, step, *, gradients=None, values=None, lr=None):
    """Make an update on all places: what differs is given by rank and name."""
    if step == 0:
        for place in places:
            place.write(0, START)
    for number, place in enumerate(places):
        place.write(step, GRADIENTS, gradients, (lr or {}).get(number, 1))
        place.write(step, PARAMETERS, values)
        place.go(index_of(step, PARAMETERS))


def settle(places, last):
    for place in places * 2:
        place.go(last)


@pytest.fixture
def two(tmp_path, store):
    names = ["x", "y"]
    return [
        Place(tmp_path, store, "x", (0, 1), names),
        Place(tmp_path, store, "y", (2,), names),
    ]


def test_equal_places_find_nothing_and_keep_no_more_keys_than_they_need(two, store):
    for step in range(KEYS):
        update(two, step)
    keys = store.num_keys()
    for step in range(KEYS, 5 * KEYS):
        update(two, step)
    settle(two, 10 * KEYS)
    assert [place.crossing.found for place in two] == [None, None]
    progress = [place.crossing.progress for place in two]
    assert [(one.due, one.verdicts, one.skipped) for one in progress] == [(10 * KEYS + 1, 0, 0)] * 2
    assert store.num_keys() == keys


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_difference_is_traced_to_step_tensor_and_rank(two, odd):
    for step in range(6):
        update(two, step, values={(odd, "b"): 5} if step >= 3 else {})
    settle(two, index_of(5, PARAMETERS))
    for place in two:
        found = place.crossing.found
        assert (found.step, found.phase, found.ranks) == (3, PARAMETERS, (0, 1, 2))
        assert [(d.name, d.kind, d.odd) for d in found.differences] == [("b", "parameter", (odd,))]


def test_what_began_with_a_gradient_is_traced_to_it(two):
    for step in range(5):
        bad = {(2, "a"): 5} if step == 2 else {}
        update(two, step, gradients=bad, values={(2, "a"): 6} if step >= 2 else {})
    settle(two, index_of(4, PARAMETERS))
    assert {(p.crossing.found.step, p.crossing.found.phase) for p in two} == {(2, GRADIENTS)}


def test_places_whose_digests_are_made_otherwise_are_not_compared_and_it_is_said(tmp_path, store):
    both = [
        Place(tmp_path, store, "x", (0,), ["x", "y"]),
        Place(tmp_path, store, "y", (1,), ["x", "y"], method="xxh3"),
    ]
    other = {(1, name): 5 for name in ("a", "b")}
    both[0].write(0, START)
    both[1].write(0, START, other)
    for step in range(5):
        for place in both:
            place.write(step, GRADIENTS, other)
            place.write(step, PARAMETERS, other)
            place.go(index_of(step, PARAMETERS))
    settle(both, index_of(4, PARAMETERS))
    for place in both:
        progress = place.crossing.progress
        assert (place.crossing.found, progress.apart, progress.over) == (None, True, True)
        assert progress.verdicts == 1


def test_gradients_that_differ_alone_are_no_difference(two):
    for step in range(5):
        update(two, step, gradients={(2, "a"): 5})
    settle(two, index_of(4, PARAMETERS))
    assert [place.crossing.progress.verdicts for place in two] == [0, 0]


def test_settings_that_differ_are_found_before_the_update_they_are_for(two):
    for step in range(4):
        update(two, step, lr={1: 2} if step >= 1 else {})
    settle(two, index_of(3, PARAMETERS))
    found = two[0].crossing.found
    assert (found.step, found.phase, found.differences[0].kind) == (1, GRADIENTS, "setting")


def test_stages_of_a_pipeline_are_left_out_and_what_they_share_is_not(tmp_path, store):
    names = ["x", "y"]
    places = [
        Place(tmp_path, store, "x", (0,), names, ("shared", "first")),
        Place(tmp_path, store, "y", (1,), names, ("shared", "second")),
    ]
    for step in range(12):
        update(places, step, values={(1, "shared"): 3} if step >= 9 else {})
    settle(places, index_of(11, PARAMETERS))
    for place in places:
        assert place.crossing.progress.left_out == ["first", "second"]
        found = place.crossing.found
        assert (found.step, [d.name for d in found.differences]) == (9, ["shared"])


def test_shards_are_compared_with_their_own_replicas(tmp_path, store):
    names, cohorts = ["x", "y"], {0: "0 of 2", 1: "1 of 2", 2: "0 of 2", 3: "1 of 2"}
    places = [
        Place(tmp_path, store, "x", (0, 1), names, cohorts=cohorts),
        Place(tmp_path, store, "y", (2, 3), names, cohorts=cohorts),
    ]
    for step in range(6):
        parts = {(rank, "a"): 50 + rank % 2 for rank in cohorts}
        update(places, step, values=parts | ({(3, "a"): 9} if step == 4 else {}))
    settle(places, index_of(5, PARAMETERS))
    (difference,) = places[0].crossing.found.differences
    assert (places[0].crossing.found.step, difference.groups) == (4, ((1,), (3,)))


def test_a_place_that_is_far_behind_is_skipped_and_raises_no_alarm(two):
    ahead, behind = two
    for place in two:
        place.write(0, START)
        for step in range(40):
            place.write(step, GRADIENTS)
            place.write(step, PARAMETERS, {(2, "a"): 5} if step == 1 else {})
    ahead.go(index_of(39, PARAMETERS))
    behind.go(index_of(39, PARAMETERS))
    settle(two, index_of(39, PARAMETERS))
    assert behind.crossing.progress.skipped == 81 - KEYS
    assert behind.crossing.progress.verdicts == 0


def test_what_places_send_at_the_end_lies_beside_what_was_written_here(two):
    here, there = two
    for step in range(4):
        update(two, step, values={(2, "b"): 5} if step == 3 else {})
    there.folder.write(there.folder.end(2), {"code": 0})
    sent = bundle(there.folder, there.ranks, {STREAM: index_of(3, PARAMETERS)})
    lay_out(here.folder, [sent])
    look = Exchange(here.folder, STREAM, [0, 1, 2]).look
    found = divergence(look, index_of(3, PARAMETERS))
    assert (found.ranks, found.differences[0].odd) == ((0, 1, 2), (2,))
    assert here.folder.read(here.folder.end(2)) == {"code": 0}


class Hung:
    """A place of which some ranks wait; what they write is made up."""

    def __init__(self, tmp_path, store, name, places):
        root = tmp_path / name
        root.mkdir()
        self.folder, self.ranks = Folder(root), places.ranks[name]
        self.board = Board(store, "alarms")
        self.carriers = {r: Alarms(self.folder, places, r, name) for r in self.ranks}
        for rank in self.ranks:
            self.folder.write(self.folder.start(rank), {"pid": 1, "began": None, "host": name})

    def tell(self, rank, **stall):
        self.folder.write(self.folder.stall(rank), {"waiting": True, **stall})

    def go(self):
        due = [carrier for carrier in self.carriers.values() if carrier.is_due()]
        assert len(due) == 1
        due[0].carry(self.board)

    def stalls(self):
        return {r: s for r in range(3) if (s := self.folder.read(self.folder.stall(r))) is not None}


@pytest.fixture
def hung(tmp_path, store):
    places = Places({"x": (0, 1), "y": (2,)}, {0: "n0", 1: "n0", 2: "n1"})
    return [Hung(tmp_path, store, name, places) for name in places.ranks]


def go(places, times=2):
    for place in places * times:
        place.go()


def test_where_nobody_waits_there_is_no_alarm_anywhere(hung, store):
    keys = store.num_keys()
    go(hung)
    assert not any(place.folder.alarm.exists() for place in hung)
    assert store.num_keys() == keys


@pytest.mark.parametrize("first", [0, 1])
def test_an_alarm_reaches_the_other_place_and_what_the_ranks_do_reaches_both(hung, first):
    raising, other = hung[first], hung[1 - first]
    raising.folder.claim("alarm")
    go(hung)
    assert other.folder.alarm.exists()
    for place in hung:
        for rank in place.ranks:
            place.tell(rank, idle=float(rank))
    go(hung)
    for place in hung:
        assert {r: s["idle"] for r, s in place.stalls().items()} == {0: 0.0, 1: 1.0, 2: 2.0}
        assert [place.folder.start(rank).exists() for rank in range(3)] == [True] * 3
    # What is written later replaces it.
    other.tell(other.ranks[0], idle=9.0)
    go(hung)
    assert raising.stalls()[other.ranks[0]]["idle"] == 9.0


def test_an_alarm_that_is_withdrawn_is_over_at_both_places_and_may_come_again(hung):
    here, there = hung
    for idle in (1.0, 2.0):
        here.folder.claim("alarm")
        go(hung)
        here.tell(0, idle=idle)
        there.tell(2, idle=idle)
        go(hung)
        assert there.stalls()[0]["idle"] == here.stalls()[2]["idle"] == idle
        here.folder.alarm.unlink()
        go(hung)
        assert not any(place.folder.alarm.exists() for place in hung)
        for place, rank in ((here, 0), (there, 2)):
            place.folder.stall(rank).unlink()
    # A rank that goes on while others wait takes back what it has said.
    here.folder.claim("alarm")
    here.tell(0)
    there.tell(2)
    go(hung)
    here.folder.stall(0).unlink()
    here.tell(1)
    go(hung)
    assert set(there.stalls()) == {1, 2}


def test_the_next_rank_carries_alarms_once_the_one_before_it_has_ended(hung):
    here, there = hung
    assert [carrier.is_due() for carrier in here.carriers.values()] == [True, False]
    here.folder.write(here.folder.end(0), {"code": 0})
    assert here.carriers[1].is_due()
    there.folder.claim("alarm")
    here.tell(1)
    there.go()
    here.carriers[1].carry(here.board)
    there.go()
    assert set(there.stalls()) == {1}
    assert there.folder.read(there.folder.end(0)) == {"code": 0}


def test_a_place_whose_ranks_have_all_ended_is_known_by_what_it_left(hung):
    here, there = hung
    there.folder.write(there.folder.end(2), {"code": 0})
    there.board.put_large("end/y", bundle(there.folder, there.ranks, {}))
    here.folder.claim("alarm")
    here.tell(0)
    here.go()
    assert here.folder.read(here.folder.end(2)) == {"code": 0}


def test_who_has_judged_ends_when_the_others_know_of_it(hung):
    here, there = hung
    here.folder.claim("alarm")
    go(hung)
    here.folder.claim("stopped")
    here.go()
    assert not here.folder.stopped_everywhere.exists()
    there.go()
    assert there.folder.stopped_elsewhere.exists()
    assert there.folder.stopped.exists()
    assert not there.folder.claim("answered"), "another place has answered"
    here.go()
    assert here.folder.stopped_everywhere.exists()
    assert not here.folder.stopped_elsewhere.exists()
    assert not there.folder.stopped_everywhere.exists()


def test_after_a_failure_the_others_are_asked_and_not_for_ever(hung, monkeypatch):
    here, there = hung
    monkeypatch.setattr(alarms, "PATIENCE", 0.2)
    here.carriers[0].ask(here.board)
    assert here.stalls() == {}
    there.tell(2)
    there.go()
    assert there.folder.alarm.exists()
    monkeypatch.setattr(alarms, "PATIENCE", 1000.0)
    here.carriers[1].ask(here.board)
    assert set(here.stalls()) == {2}


class Frozen:
    """A store whose host has stopped: whoever asks it waits for ever."""

    def __init__(self):
        self.asked = threading.Event()
        self.never = threading.Event()

    def clone(self):
        return self

    def set_timeout(self, timeout):
        pass

    def append(self, key, line):
        self.asked.set()
        self.never.wait()


class Gone(Frozen):
    """A store whose host is no longer there."""

    def append(self, key, line):
        raise dist.DistNetworkError("Connection was closed\nframe #0: c10::Error")


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Frozen, "the store did not answer"), (Gone, "DistNetworkError: Connection was closed")],
)
def test_a_store_that_is_of_no_use_holds_nobody_up(tmp_path, monkeypatch, kind, why):
    monkeypatch.setattr(bridges, "CLOSING", 0.1)
    store = kind()
    bridge = Bridge(
        store, Folder(tmp_path), name="", rank=0, world_size=2, host="n0", on_found=print
    )
    for index in range(3):
        bridge.offer(STREAM, index, "optimizer 0 (SGD)")
    bridge.close()
    assert bridge.hand_over(alone=False) is None
    assert bridge.failed == why
    store.never.set()
