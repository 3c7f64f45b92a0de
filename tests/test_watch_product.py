"""The product below the digest: every way gives the same integers, and what they tell apart."""

from __future__ import annotations

import timeit

import pytest
import torch

from harness.watch.digests import product
from harness.watch.digests.digest import Digester
from harness.watch.digests.product import MANY, ROW, SUMS, product_for

CPU = torch.device("cpu")
WAYS = [product._int8, product._packed, product._by_float32, product._by_float64]
SLOWEST = 20
"""Times of a product of plain floats that mean a way without instructions of its own: 120 on an
Ice Lake, where others take less than one."""


def extremes(count):
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(-128, 128, (count, ROW), dtype=torch.int8, generator=generator)
    largest = torch.where(product.weights(CPU).t() < 0, 127, -128).to(torch.int8)
    rows[: len(largest)] = largest[: len(rows)]
    rows[-1] = -128
    return rows


def exact(rows):
    return (rows.to(torch.int64) @ product.weights(CPU).to(torch.int64)).to(torch.int32)


@pytest.mark.parametrize("count", [1, 2, 16, 17, 300, MANY, MANY + 7])
def test_all_ways_give_the_same_integers(count):
    rows = extremes(count)
    expected = exact(rows)
    out = torch.empty((count, SUMS), dtype=torch.int32)
    product_for(CPU, count)(rows, out)
    assert torch.equal(out, expected)
    for way in WAYS:
        if way in (product._by_float32, product._by_float64) or product._is_exact(way, CPU, True):
            out.fill_(-1)
            way(CPU)(rows, out)
            assert torch.equal(out, expected), way


def test_some_way_is_a_fast_one_here():
    assert product._is_exact(product._int8, CPU, False) or not hasattr(torch, "_int_mm")


@pytest.fixture
def one_thread():
    """Threads that wait for each other on a busy core take longer than a product does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("count", [16, 300, MANY])
@pytest.mark.usefixtures("one_thread")
def test_the_way_that_is_taken_is_a_fast_one_here(count):
    rows, out = extremes(count), torch.empty((count, SUMS), dtype=torch.int32)

    def seconds(call):
        call(rows, out)
        return min(timeit.repeat(lambda: call(rows, out), number=1, repeat=5))

    assert seconds(product_for(CPU, count)) < SLOWEST * seconds(product._by_float32(CPU))


def test_a_way_without_instructions_of_its_own_is_not_taken(monkeypatch):
    tried = []

    def reference(device):
        exact = product._by_float64(device)

        def row_by_row(rows, out):
            tried.append(len(rows))
            for row in range(len(rows)):
                for _ in range(50):
                    exact(rows[row : row + 1], out[row : row + 1])

        return row_by_row

    assert product._is_exact(reference, CPU, False)
    tried.clear()
    ways = (reference, product._by_float32)
    monkeypatch.setattr(product, "_ways", lambda device, rows: ways)
    for count in (1, MANY):
        assert product_for(CPU, count) is product._made(product._by_float32, CPU)
    assert tried == [product._TRIAL] * 4  # and not MANY, which would take long


@pytest.mark.parametrize(("times", "taken"), [(0.1, True), (1.9, True), (2.1, False)])
def test_a_way_may_take_twice_the_time_of_plain_floats(times, taken, monkeypatch):
    def way(device):
        return product._by_float64(device)

    seconds = {way: times, product._by_float32: 1.0}
    monkeypatch.setattr(product, "_seconds", lambda way, device: seconds[way])
    monkeypatch.setattr(product, "_ways", lambda device, rows: (way, product._by_float32))
    found = product_for(CPU, 5)
    assert found is product._made(way if taken else product._by_float32, CPU)


def test_a_way_that_is_not_there_is_passed_over(monkeypatch):
    ways = (lambda device: torch.ops.onednn.no_such_operator, product._by_float32)
    monkeypatch.setattr(product, "_ways", lambda device, rows: ways)
    assert product_for(CPU, 5) is product._made(product._by_float32, CPU)


@pytest.mark.parametrize("many", [False, True])
def test_a_way_that_clips_rounds_or_is_not_there_is_not_taken(many):
    def clips(device):
        exact = product._by_float64(device)
        return lambda rows, out: exact(rows.clamp(-127, 127), out)

    def rounds(device):
        weights = product.weights(device).to(torch.bfloat16)
        return lambda rows, out: out.copy_((rows.to(torch.bfloat16) @ weights).float())

    def absent(device):
        return torch.ops.onednn.no_such_operator

    for way in (clips, rounds, absent):
        assert not product._is_exact(way, CPU, many)
    assert product._is_exact(product._by_float64, CPU, many)


@pytest.mark.usefixtures("products")
def test_a_processor_with_no_fast_way_gets_the_same_digests(monkeypatch):
    values = [torch.randn(5000), torch.randn(MANY * ROW // 4 + 100), None]
    fast = Digester()(values)
    for ways in ((product._by_float32,), (product._by_float64,)):
        monkeypatch.setattr(product, "_ways", lambda device, rows, ways=ways: ways)
        assert Digester()(values) == fast
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert Digester()(values) == fast


def test_any_change_of_two_bytes_in_a_row_is_seen():
    """Exhaustive: the weights of two bytes are never zero nor multiples of each other.

    d * v + e * w is zero for no d and e that are not both zero.
    """
    vectors = product.weights(CPU).to(torch.float64)
    lengths = vectors.norm(dim=1)
    assert lengths.min() > 0
    unit = vectors / lengths[:, None]
    parallel = (unit @ unit.t()).abs().fill_diagonal_(0)
    assert parallel.max() < 1 - 1e-9


def test_any_flipped_bit_of_a_row_is_seen():
    """Exhaustive, of all 16384 bits."""
    row = extremes(20)[10]
    before = exact(row[None])
    flips = torch.arange(8).repeat(ROW)
    places = torch.arange(ROW).repeat_interleave(8)
    changed = row.repeat(len(places), 1)
    bits = torch.bitwise_left_shift(torch.ones_like(flips), flips).to(torch.uint8).view(torch.int8)
    changed[torch.arange(len(places)), places] ^= bits
    out = torch.empty((len(places), SUMS), dtype=torch.int32)
    product_for(CPU, len(places))(changed, out)
    assert len(torch.unique(torch.cat([out, before]), dim=0)) == len(places) + 1
