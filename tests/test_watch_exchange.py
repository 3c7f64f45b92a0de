"""What ranks write for each other: equal, different, not there yet, still on its way from a GPU."""

from __future__ import annotations

import pytest
import torch

from harness.watch.digests import digest
from harness.watch.digests.digest import Digester
from harness.watch.digests.pending import Pending
from harness.watch.layout import GRADIENTS, PARAMETERS, START, Entry, Layout, index_of
from harness.watch.meeting.exchange import _BEHIND, Exchange
from harness.watch.meeting.folder import Folder
from harness.watch.meeting.ring import Reader

LATER = index_of(1, GRADIENTS)


class Arriving:
    """Stands for the memory that a GPU copies to."""

    def __init__(self, numbers):
        self.numbers = numbers
        self.arrived = False
        self.waited = False

    def ready(self):
        return self.arrived

    def take(self):
        self.waited = not self.arrived
        return torch.as_tensor(self.numbers).tolist()


def layout(name):
    entries = (Entry(name=name, kind="parameter"),)
    return Layout({phase: entries for phase in (START, GRADIENTS, PARAMETERS)})


@pytest.fixture
def ranks(tmp_path):
    both = [Exchange(Folder(tmp_path), "optimizer0", [0, 1]) for _ in range(2)]
    for rank, exchange in enumerate(both):
        assert exchange.declare(rank, layout("a"))
    return both


def test_the_last_rank_to_come_sees_whether_all_are_equal(ranks):
    for index, other, equal in ((LATER, [7], True), (LATER + 1, [8], False)):
        assert ranks[0].post(index, [7]) == [index]
        assert ranks[0].all_equal(index) is None
        assert ranks[1].post(index, other) == [index]
        assert ranks[1].all_equal(index) is equal
        assert ranks[0].all_equal(index) is equal
    # A look at what is no longer the last: from the file alone.
    assert ranks[1].all_equal(LATER) is True


def test_the_first_update_is_always_looked_at_in_full(ranks):
    for index in (index_of(0, START), index_of(0, GRADIENTS)):
        for exchange in ranks:
            exchange.post(index, [7])
        assert ranks[1].all_equal(index) is False
    for exchange in ranks:
        exchange.post(index_of(0, PARAMETERS), [7])
    assert ranks[1].all_equal(index_of(0, PARAMETERS)) is True


def test_another_layout_with_the_same_digests_is_equal(ranks):
    ranks[0].declare(0, layout("b"))
    for exchange in ranks:
        exchange.post(LATER, [7])
    assert ranks[1].all_equal(LATER) is True
    names = [entries[0].name for entries, _ in ranks[1].look(LATER).values()]
    assert names == ["b", "a"]


def test_half_of_a_slot_is_not_there(ranks, tmp_path):
    for exchange in ranks:
        exchange.post(LATER, [7])
    ring = tmp_path / "optimizer0.rank0.ring"
    raw = bytearray(ring.read_bytes())
    assert raw.rstrip(b"\0")[-1] == 7
    raw[len(raw.rstrip(b"\0")) - 1] = 6
    ring.write_bytes(raw)
    assert ranks[1].all_equal(LATER) is None


def test_a_peer_says_whether_it_wrote_the_same_or_another_thing_or_nothing_yet(ranks, tmp_path):
    ring = Reader(tmp_path / "optimizer0.rank0.ring")
    ranks[1].post(LATER, [7])
    mine = ranks[1]._written[LATER]
    assert ring.holds(LATER, mine) is None
    ranks[0].post(LATER, [7])
    assert ring.holds(LATER, mine) is True
    ranks[0].post(LATER, [8])
    assert ring.holds(LATER, mine) is False
    assert ring.holds(LATER + 1, mine) is None


def test_what_a_gpu_owes_is_written_later_in_order_and_without_waiting(ranks):
    first, second = Arriving([7]), Arriving([8])
    assert ranks[0].post(LATER, Pending([], [([0], first)])) == []
    assert ranks[0].post(LATER + 1, Pending([], [([0], second)])) == []
    assert ranks[0].look(LATER) == {}
    second.arrived = True
    assert ranks[0].post(LATER + 2, [9]) == []
    first.arrived = True
    assert ranks[0].post(LATER + 3, [10]) == [LATER, LATER + 1, LATER + 2, LATER + 3]
    assert [ranks[0].look(LATER + step)[0][1] for step in range(4)] == [(7,), (8,), (9,), (10,)]
    assert not first.waited
    assert not second.waited


def test_each_one_that_arrives_late_is_compared(ranks):
    for index, other in ((LATER, 7), (LATER + 1, 8), (LATER + 2, 7)):
        ranks[1].post(index, [other])
    owed = [Arriving([7]) for _ in range(3)]
    for place, one in enumerate(owed):
        assert ranks[0].post(LATER + place, Pending([], [([0], one)])) == []
    equal = [ranks[0].all_equal(index) for index in ranks[0].finish()]
    assert equal == [True, False, True]
    assert ranks[0].finish() == []


def test_no_more_than_a_few_are_owed(ranks):
    owed = [Arriving([step]) for step in range(_BEHIND + 2)]
    written = [
        ranks[0].post(LATER + step, Pending([], [([0], one)])) for step, one in enumerate(owed)
    ]
    assert written == [[]] * _BEHIND + [[LATER], [LATER + 1]]
    assert [one.waited for one in owed] == [True] * 2 + [False] * _BEHIND


@pytest.mark.usefixtures("products")
def test_a_device_that_is_not_waited_for_gives_the_same_digests(monkeypatch):
    tensors = [torch.randn(70_000), None, torch.randn(5), torch.zeros(0), torch.randn(1 << 19)]
    at_once = Digester()(tensors, sampled=True)
    coming = []
    monkeypatch.setattr(digest, "_DEFERRED", ("cpu",))
    monkeypatch.setattr(
        digest, "Coming", lambda numbers: coming.append(one := Arriving(numbers)) or one
    )
    digester = Digester()
    for _ in range(2):
        later = digester.later(tensors, sampled=True, before=[3, 4])
        assert isinstance(later, Pending)
        assert not later.ready()
        coming[-1].arrived = True
        assert later.ready()
        assert later.take() == [3, 4, *at_once]
    assert digester(tensors, sampled=True) == at_once
    assert digester.later([], before=[5]) == [5]


def test_what_is_in_the_memory_of_the_processor_is_there_at_once(method):
    tensors = [torch.randn(70_000), None, torch.randn(5)]
    digester = Digester()
    coming = digester._coming(tensors, torch.device("cpu"))
    assert coming.ready()
    assert Pending([3], [(range(3), coming)]).take() == [3, *digester(tensors)]


def test_parts_of_several_devices_find_their_places():
    parts = [([0, 3], Arriving([10, 13])), ([1, 2], Arriving([11, 12]))]
    later = Pending([9], parts)
    parts[0][1].arrived = True
    assert not later.ready()
    assert later.take() == [9, 10, 11, 12, 13]
