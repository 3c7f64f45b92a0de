"""Samples of large tensors: the same places on every rank, from everywhere, nothing but reading."""

from __future__ import annotations

import pytest
import torch

from harness.watch.digests.digest import Digester
from harness.watch.digests.sample import (
    FEW,
    FROM,
    LARGE,
    LINES,
    MANY,
    is_sampled,
    part_of,
    parts_of,
    sample,
)

SIZE = FROM // 4 + 13
LINE = 64
"""Elements of four bytes in a line."""


def of(tensor, **how):
    return Digester()([tensor], **how)[0]


def seen(tensor):
    """Which elements the sample has, found by changing them one part at a time."""
    numbers = torch.arange(tensor.numel(), dtype=torch.int32).view(tensor.shape)
    laid_out = torch.empty_like(tensor, dtype=torch.int32).copy_(numbers)
    return sample(laid_out).view(torch.int32).view(-1)


def test_large_tensors_only_are_sampled():
    assert not is_sampled(torch.empty(FROM // 4 - 1))
    assert is_sampled(torch.empty(FROM // 4))
    small = torch.randn(FROM // 4 - 1)
    assert of(small, sampled=True) == of(small)
    small[1000] += 1
    assert of(small, sampled=True) == of(small)


def test_a_sample_has_lines_of_its_tensor_from_every_part_of_it():
    places = seen(torch.empty(SIZE)).view(LINES, LINE)
    assert torch.equal(places, places[:, :1] + torch.arange(LINE))
    assert not (places[:, 0] % LINE).any()
    assert len(places.unique()) == LINES * LINE
    parts = torch.div(places[:, 0] * LINES, SIZE // LINE * LINE, rounding_mode="floor")
    assert torch.equal(parts, torch.arange(LINES))
    # Not the first line of each part: places in step with rows would see the same columns only.
    assert len((places[:, 0] % (SIZE // LINES)).unique()) > 5


def test_what_is_sampled_counts_and_the_rest_does_not():
    places = seen(torch.empty(SIZE)).to(torch.int64)
    ones = torch.ones(SIZE)
    only = torch.zeros(SIZE)
    only[places] = 1
    assert of(only, sampled=True) == of(ones, sampled=True)
    assert of(only) != of(ones)
    for place in places[:: LINES // 8]:
        changed = ones.clone()
        changed[place] = 2
        assert of(changed, sampled=True) != of(ones, sampled=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128])
def test_all_dtypes_can_be_sampled(dtype):
    values = torch.ones(2 * FROM + 1, dtype=dtype)
    assert sample(values).shape == (LINES, 4 * LINE)
    assert of(values, sampled=True) == of(values.clone(), sampled=True)
    assert of(values * 3, sampled=True) != of(values, sampled=True)


def test_strides_and_offset_do_not_change_the_sample():
    values = torch.randn(256, 128, 3, 3)
    plain = sample(values)
    assert torch.equal(sample(values.to(memory_format=torch.channels_last)), plain)
    assert torch.equal(sample(values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)), plain)
    shifted = torch.empty(values.numel() + 3)[3:].view_as(values).copy_(values)
    assert torch.equal(sample(shifted), plain)
    expanded = torch.randn(600, 1).expand(600, 600)
    assert torch.equal(sample(expanded), sample(expanded.contiguous()))
    wide = torch.randn(512, 1024)[:, ::2]
    assert torch.equal(sample(wide), sample(wide.contiguous()))


def test_differences_as_missing_synchronisation_makes_them_are_seen():
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(1024, 512, generator=generator)
    before = of(gradient, sampled=True)
    assert of(gradient + 1e-7, sampled=True) != before
    assert of(-gradient, sampled=True) != before
    assert of(gradient.roll(1, 0), sampled=True) != before
    # One column: an input of one feature.
    changed = gradient.clone()
    changed[:, 77] = 0
    assert of(changed, sampled=True) != before


def test_conjugated_and_negated_views_are_what_they_mean():
    values = torch.randn(SIZE, dtype=torch.complex64)
    for meant in (values.conj(), values.conj().imag):
        assert meant.is_conj() or meant.is_neg()
        for sampled in (False, True):
            plain = meant.resolve_conj().resolve_neg()
            assert of(meant, sampled=sampled) == of(plain, sampled=sampled)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((512, 256), FEW),
        ((515, 300), FEW),
        ((257, 64, 3, 3), FEW),
        ((4, 100_000), FEW),
        ((2048, 1024), MANY),
        ((1030, 2050), MANY),
    ],
)
def test_the_parts_have_all_of_a_tensor(shape, parts):
    values = torch.zeros(shape)
    assert parts_of(values) == parts
    for turn in range(100, 100 + parts):
        part_of(values, turn).add_(1)
    assert len({part_of(values, turn).shape for turn in range(parts)}) == 1
    assert (values > 0).all()
    assert values.mean() < 1 + parts / shape[0]


def test_what_cannot_be_divided_is_read_whole():
    assert not parts_of(torch.empty(FEW - 1, FROM))
    assert not parts_of(torch.empty(MANY - 1, LARGE // 4))
    assert not parts_of(torch.empty(FROM // 4 - 1))
    flat = torch.randn(FEW - 1, FROM)
    before = Digester().later([flat], part=1)
    flat[0, 0] += 1
    assert Digester().later([flat], part=1) != before


@pytest.mark.parametrize("part", range(FEW))
def test_a_changed_element_is_seen_in_its_part_only(part):
    values = torch.randn(1024, 512)
    small = torch.randn(30)
    before = Digester().later([values, small], part=part)
    for other in range(FEW):
        changed = values.clone()
        changed[1024 // FEW * other + 7, 300] += 1e-6
        after = Digester().later([changed, small], part=part)
        assert (after[0] != before[0]) is (other == part)
        assert after[1] == before[1]


SHAPES = [(64, 256), (256,), (300, 700), (700,), (1030, 300), (), (0, 4)]


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("part", [None, 0, 3])
def test_gradients_that_wait_have_the_digests_that_they_had(part):
    gradients = [torch.randn(shape) for shape in SHAPES] + [None]
    parameters = [torch.randn(shape) for shape in [*SHAPES, (5,)]]
    alone = Digester()
    due = alone(gradients, sampled=True)
    waiting = alone.stage(gradients, parameters, part)
    # What an optimizer does in between.
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.sub_(gradient)
            gradient.zero_()
    found = waiting.finish(parameters)
    assert found == (due, Digester().later(parameters, part=part))
    # Buffers are used again: nothing of the first time is left.
    assert alone.stage(gradients, parameters, part).finish(parameters)[0] != due


@pytest.mark.usefixtures("products")
def test_what_waits_in_turns_whole_and_in_parts_is_digested_as_it_is():
    gradients, parameters = ([torch.randn(shape) for shape in SHAPES] for _ in range(2))
    digester = Digester()
    for part in (None, 1, None, 2, 3):
        due = digester(gradients, sampled=True), digester.later(parameters, part=part)
        assert digester.stage(gradients, parameters, part).finish(parameters) == due


@pytest.mark.usefixtures("products")
def test_what_is_negated_while_others_wait_is_digested_as_what_it_means():
    gradients, values = [torch.ones(3)], torch.randn(FROM // 4 - 1)
    others = [torch.randn(FROM // 4 - 1) for _ in range(2)]
    digester = Digester()
    for parameter in (values, torch._neg_view(-values), values):
        parameters = [parameter, *others]
        found = digester.stage(gradients, parameters, None).finish(parameters)
        assert found[1] == Digester()([values, *others])


@pytest.mark.usefixtures("products")
def test_much_does_not_wait():
    many = [torch.randn(FROM // 4 - 1) for _ in range(6)]
    assert Digester().stage(many, many, None) is None


def test_where_hashing_is_fast_nothing_waits(method):
    few = [torch.randn(3)]
    assert (Digester().stage(few, few, None) is None) is (method == "xxh3")
