"""The digest of the watcher: it sees every bit and every order, and depends on nothing else."""

from __future__ import annotations

import random

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.watch.digests import plan
from harness.watch.digests.digest import Digester
from harness.watch.digests.drawn import random_bytes
from harness.watch.digests.plan import BLOCK, FEW, LARGE, Plan
from harness.watch.digests.product import MANY, ROW, SUMS
from harness.watch.digests.sample import FROM

SIZES = [1, 2, 3, 7, 64, 511, 513, LARGE // 4 - 1, LARGE // 4, LARGE // 4 + 3, LARGE + 5]


@pytest.fixture(autouse=True)
def _method(method):
    """All of these tests hold for either way."""


def of(*tensors):
    return Digester()(list(tensors))


@pytest.mark.parametrize("size", SIZES)
def test_every_kind_of_bit_flip_is_seen(size):
    values = torch.randn(size)
    before = of(values)
    draw = random.Random(size)
    places = {0, size - 1, size // 2, *(draw.randrange(size) for _ in range(20))}
    for place in places:
        for bit in (0, 1, 15, 22, 23, 30, 31):
            flipped = values.clone()
            flipped.view(torch.int32)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
            assert of(flipped) != before, (place, bit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_flipped_signs_do_not_cancel(dtype):
    values = torch.ones(4096, dtype=dtype)
    seen = {of(values)[0]}
    for other in range(1, 200):
        flipped = values.clone()
        flipped[[0, other * 20]] *= -1
        seen.add(of(flipped)[0])
    assert len(seen) == 200
    assert of(-values) != of(values)


@pytest.mark.parametrize("size", [64, ROW // 4, 4 * LARGE])
def test_permutations_are_seen(size):
    values = torch.where(torch.arange(size) % 3 == 0, 1.0, -1.0)
    before = of(values)
    draw = random.Random(3)
    row = ROW // 4
    for _ in range(50):
        a, b = draw.randrange(size), draw.randrange(size)
        swapped = values.clone()
        swapped[[a, b]] = values[[b, a]]
        assert (of(swapped) != before) == bool(values[a] != values[b]), (a, b)
    if size > row:
        ramp = torch.arange(size, dtype=torch.float32)
        seen = {of(ramp)[0]}
        pairs = [(row, 1), (row, 63), (row, 64), (row * BLOCK, 1), (row * BLOCK, 3)]
        for length, other in pairs:
            a, b = slice(0, length), slice(other * length, (other + 1) * length)
            rows = ramp.clone()
            rows[a], rows[b] = ramp[b], ramp[a]
            seen.add(of(rows)[0])
        assert len(seen) == 1 + len(pairs)
    assert of(values.roll(1)) != before


@st.composite
def damaged(draw):
    """Bytes, and what became of them: the same ones in other places, others in the same place."""
    size = draw(st.sampled_from([1, 40, ROW, ROW + 8, 3 * ROW, 70 * ROW, LARGE + 12]))
    pattern = draw(st.binary(min_size=1, max_size=64))
    before = bytearray((pattern * size)[:size])
    after = bytearray(before)
    places = st.integers(0, size - 1)
    for _ in range(draw(st.integers(1, 4))):
        a, b, length = draw(places), draw(places), draw(st.sampled_from([1, 4, 8, 64, ROW]))
        length = min(length, size - a, size - b)
        kind = draw(st.sampled_from(["flip", "swap", "copy", "fill", "negate"]))
        if kind == "flip":
            after[a] ^= 1 << draw(st.integers(0, 7))
            after[b] ^= 128
        elif kind == "swap":
            after[a : a + length], after[b : b + length] = (
                after[b : b + length],
                after[a : a + length],
            )
        elif kind == "copy":
            after[a : a + length] = after[b : b + length]
        elif kind == "fill":
            after[a : a + length] = bytes([draw(st.integers(0, 255))]) * length
        else:
            after[a : a + length] = bytes(256 - byte & 255 for byte in after[a : a + length])
    return before, after


@settings(max_examples=300, deadline=None)
@given(damaged())
def test_digests_differ_exactly_where_bytes_do(pair):
    before, after = (torch.frombuffer(raw, dtype=torch.uint8) for raw in pair)
    assert (of(before) == of(after)) == torch.equal(before, after)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, float("nan")])
def test_constants_of_any_length_differ(value):
    sizes = [0, *range(1, 70), 2 * ROW, LARGE, LARGE + 1]
    assert len({of(torch.full((size,), value))[0] for size in sizes}) == len(sizes)


def test_absent_empty_shape_and_dtype_count():
    zeros = [torch.zeros(6), torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6).int()]
    others = [None, torch.zeros(0), torch.zeros(3, dtype=torch.float64), torch.tensor(0.0)]
    assert len(set(of(*zeros, *others))) == len(zeros) + len(others)


def test_signed_zeros_and_nan_payloads_count():
    plain = torch.tensor([0.0, float("nan")])
    assert of(torch.tensor([-0.0, float("nan")])) != of(plain)
    payload = plain.clone()
    payload.view(torch.int32)[1] ^= 1
    assert torch.isnan(payload[1])
    assert of(payload) != of(plain)


@pytest.mark.parametrize("size", [5, ROW, LARGE, LARGE + 77, MANY * ROW // 4 + 3])
def test_company_memory_format_and_offset_do_not_count(size):
    values = torch.randn(size)
    alone = of(values)[0]
    crowd = [torch.randn(3 * LARGE), torch.randn(9), values, None, torch.randn(ROW)]
    assert of(*crowd)[2] == alone
    shifted = torch.empty(size + 1)[1:].copy_(values)
    assert of(shifted)[0] == alone
    spread = torch.empty(size, 2)[:, 1].copy_(values)
    assert of(spread)[0] == alone
    image = torch.randn(4, 3, 5, 6)
    assert of(image.to(memory_format=torch.channels_last)) == of(image)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.uint8],
)
def test_all_dtypes_and_odd_lengths(dtype):
    values = (torch.arange(LARGE + 3) % 2).to(dtype)
    changed = values.clone()
    changed[-1] = ~values[-1] if dtype == torch.bool else 7
    small = values[:5].clone(), changed[-5:].clone()
    assert of(values) == of(values.clone()) != of(changed)
    assert of(small[0]) != of(small[1])


def test_it_reuses_its_buffers_without_a_trace_of_what_was_there():
    digester = Digester()
    first, second = [torch.randn(70)], [torch.randn(70)]
    a, b = digester(first), digester(second)
    assert a != b
    assert digester(first) == a
    digester([torch.randn(300_000), None])
    assert digester(second) == b


def test_the_digest_never_changes(method):
    """Ranks may have different processors and versions of torch: here it is by its definition."""
    raw = b"".join(value.to_bytes(4, "little", signed=True) for value in range(-34_000, 34_000))
    digests = random_bytes("torch.int32 (68000,)", 8)
    if method == "xxh3":
        number = xxhash.xxh3_64_intdigest(raw, int.from_bytes(digests, "little"))
        expected = signed(number.to_bytes(8, "little"), 8)
        assert of(torch.arange(-34_000, 34_000, dtype=torch.int32)) == expected
        return
    expected = signed(digests, 8)[0]
    columns = signed(random_bytes("bytes", ROW * SUMS), 1)
    blocks = signed(random_bytes("blocks", 64 * SUMS * 8), 8)

    def sums(raw):
        found = []
        for start in range(0, len(raw), ROW):
            part = signed(raw[start : start + ROW], 1)
            for column in range(SUMS):
                weights = columns[column * ROW : (column + 1) * ROW]
                found.append(sum(x * (w >> 1) for x, w in zip(part, weights, strict=False)))
        return found

    # 133 rows, so three blocks, and the last row of the last block is not full.
    of_rows = b"".join(one.to_bytes(4, "little", signed=True) for one in sums(raw))
    for one, weight in zip(sums(of_rows), blocks, strict=False):
        expected += one * (weight | 1)
    expected = (expected + 2**63) % 2**64 - 2**63
    assert len(sums(of_rows)) == 3 * SUMS
    assert of(torch.arange(-34_000, 34_000, dtype=torch.int32)) == [expected]


def signed(raw, size):
    return [
        int.from_bytes(raw[i : i + size], "little", signed=True) for i in range(0, len(raw), size)
    ]


@pytest.mark.parametrize("size", [3, LARGE, FROM])
def test_memory_that_was_taken_away_is_not_read(size):
    values = torch.randn(size)
    values.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="taken away"):
        Digester()([values], sampled=True)


class Boxed(torch.Tensor):
    """A tensor without memory of its own: what it holds has to be asked for."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def opened(value):
            if isinstance(value, list | tuple):
                return type(value)(map(opened, value))
            return value.held if isinstance(value, Boxed) else value

        found = func(*opened(args), **(kwargs or {}))
        return Boxed(found) if func is torch.ops.aten.detach.default else found


@pytest.mark.parametrize("shape", [(), (7,), (300, 5)])
def test_a_subclass_is_asked_for_its_values(shape):
    values = torch.randn(shape)
    assert of(Boxed(values)) == of(values) != of(Boxed(values + 1))


def test_modes_of_the_program_do_not_see_it():
    from torch.utils.flop_counter import FlopCounterMode

    values = torch.randn(LARGE)
    expected = of(values)
    with FlopCounterMode(display=False) as flops:
        inside = of(values)
    assert inside == expected
    assert flops.get_total_flops() == 0
    with torch.device("meta"):
        assert of(values) == expected


@pytest.mark.parametrize(
    "sizes", [[1], [0, 5, ROW, 3 * LARGE], [FEW // 4, 7], [9] * 40, [LARGE] * 9]
)
def test_one_product_with_a_matrix_gives_the_same_numbers(sizes, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    tensors = [None, *(torch.randn(size, generator=generator) for size in sizes)]
    numbers = Plan(tensors, torch.device("cpu")).numbers(tensors)
    assert len(set(numbers)) == len(tensors)
    # Together with others there are too many blocks for a matrix.
    crowd = [*tensors, *(torch.zeros(1) for _ in range(64))]
    assert Plan(crowd, torch.device("cpu")).numbers(crowd)[: len(tensors)] == numbers
    monkeypatch.setattr(plan, "_DENSE", 0)
    assert Plan(tensors, torch.device("cpu")).numbers(tensors) == numbers
