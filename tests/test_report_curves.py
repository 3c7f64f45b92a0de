"""Which curves a page draws and where on the page they end up: axes, panels, lines, SVG."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.record import Writer
from harness.report import series as charting
from harness.report import svg
from harness.report.axis import SHELF, fit, step_ticks
from harness.report.chart import Line, Panel
from harness.report.series import charts, colours
from harness.scenario import Arm, Plot, Role
from harness.tables import Tables
from tests.report_runs import header, record, toy

FINITE = st.floats(allow_nan=False, allow_infinity=False)
ARMS = {"one": 1, "clip_rank1": 4, "clip_hook": 4}


def drawn(tmp_path, metrics, *plots, arms=ARMS, steps=10, phases=("",), **changes):
    layout = record(tmp_path, arms, steps, metrics, phases=phases)
    return charts(toy(plots=plots, **changes), Tables.read(layout))


def svg_of(chart, at=0, columns=500):
    panel = chart.panels[at]
    data = svg.grid(panel, columns)
    return svg.draw(
        chart, panel, data, {}, frame=svg.frame(chart), shadow="", name="p", label="a label"
    )


@given(st.lists(FINITE, min_size=1), st.booleans(), st.none() | st.floats(0, 1e300))
def test_every_value_stands_on_its_axis_in_its_order(values, log, floor):
    axis = fit(values, log=log, floor=floor)
    places = [axis.place(value) for value in sorted(values)]
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    assert places == sorted(places)
    depths = axis.depths(sorted(values))
    assert all(
        abs(depth - 1000 * (1 - place)) <= 1 for depth, place in zip(depths, places, strict=True)
    )


@given(st.lists(FINITE, min_size=1), st.booleans())
def test_ticks_stand_on_the_axis_and_say_different_things(values, log):
    ticks = fit(values, log=log, floor=None).ticks()
    assert all(-1e-9 <= tick.at <= 1 + 1e-9 for tick in ticks)
    assert len({tick.label for tick in ticks}) == len(ticks)
    assert len(ticks) <= 12


@given(st.floats(1e-12, 1e12), st.floats(1.5, 1e6))
def test_a_labelled_tick_stands_at_the_value_it_says(low, factor):
    for log in (True, False):
        axis = fit([low, low * factor], log=log, floor=None)
        for tick in axis.ticks():
            value = float(tick.label.replace(",", ""))
            assert axis.place(value) == pytest.approx(tick.at, abs=0.01)


def test_a_sliver_of_large_values_is_labelled_from_its_base(tmp_path):
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": 1000.0 + 1e-9 * step},
        Plot(metric="m", title="m"),
    )
    assert chart.axis.base == pytest.approx(1000.0)
    assert any("counts from" in note for note in chart.notes)


def test_zero_has_a_shelf_below_a_logarithmic_axis():
    axis = fit([0.0, 1e-9, 1.0], log=True, floor=None)
    assert axis.log
    assert axis.place(0.0) == 0.0
    assert SHELF < axis.place(1e-9) < axis.place(1.0) < 1.0
    first = axis.ticks()[0]
    assert (first.at, first.label) == (0.0, "0")
    assert not fit([1e-9, 1.0], log=True, floor=None).zero


def test_a_negative_value_ends_the_logarithm_and_says_so(tmp_path):
    (chart,) = drawn(
        tmp_path, lambda arm, rank, step: {"m": step - 1.0}, Plot(metric="m", title="m", log=True)
    )
    assert not chart.axis.log
    assert any("linear axis" in note for note in chart.notes)


def test_the_axis_reaches_the_floor():
    assert fit([1.0, 2.0], log=False, floor=5.0).place(5.0) < 1.0
    assert fit([5.0, 6.0], log=False, floor=2.0).low == 0.0
    assert fit([5.0, 6.0], log=False, floor=None).low > 0.0
    assert fit([1e-3, 1e-2], log=True, floor=1e-9).place(1e-9) > 0.0


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 0, [0]),
        (0, 4, [0, 1, 2, 3, 4]),
        (3, 60, [20, 40, 60]),
        (0, 1000, [0, 200, 400, 600, 800, 1000]),
    ],
)
def test_steps_are_labelled_at_round_numbers(first, last, expected):
    assert step_ticks(first, last) == expected


def test_ranks_share_a_line_only_if_every_bit_agrees(tmp_path):
    def metrics(arm, rank, step):
        value = 0.1 + step
        return {"m": math.nextafter(value, 9) if rank == 2 and step == 7 else value}

    (chart,) = drawn(tmp_path, metrics, Plot(metric="m", title="m", arms=("clip_rank1",)))
    assert [line.label for line in chart.panels[0].lines] == ["ranks 0, 1, 3", "rank 2"]


def test_signed_zero_and_nan_are_told_apart_and_nan_agrees_with_itself(tmp_path):
    values = {0: 0.0, 1: -0.0, 2: math.nan, 3: math.nan}
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": values[rank] if step == 5 else float(step)},
        Plot(metric="m", title="m", arms=("clip_rank1",)),
    )
    assert [line.label for line in chart.panels[0].lines] == ["rank 0", "rank 1", "ranks 2, 3"]


def test_arms_that_agree_share_a_line_and_are_both_named(tmp_path):
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": step * (2.0 if arm == "clip_rank1" else 1.0)},
        Plot(metric="m", title="m"),
    )
    assert chart.shared
    assert chart.panels[0].groups == [("one", "clip_hook"), ("clip_rank1",)]


def test_many_lines_stand_in_panels_with_the_reference_to_compare(tmp_path):
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": step * (1.0 + rank + len(arm))},
        Plot(metric="m", title="m"),
    )
    assert [panel.groups for panel in chart.panels] == [
        [("one",)],
        [("clip_rank1",)],
        [("clip_hook",)],
    ]
    assert chart.reference == 0


def test_many_differing_ranks_become_a_band_with_its_true_edges(tmp_path):
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": float((rank * 7 + step) % 16)},
        Plot(metric="m", title="m"),
        arms={"clip_rank1": 16},
    )
    upper, lower, middle = chart.panels[0].lines
    assert (upper.edge, lower.edge, middle.edge) == (True, True, False)
    assert set(upper.points.values()) == {15.0}
    assert set(lower.points.values()) == {0.0}
    assert middle.label == "rank 0"
    assert svg_of(chart).count("<polygon") == 1


def test_bands_of_two_arms_in_one_panel_are_each_filled_to_their_own_edges(tmp_path):
    base = {"clip_rank1": 0.0, "clip_hook": 100.0}
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": base[arm] + (rank * 7 + step) % 16},
        Plot(metric="m", title="m"),
        arms={"clip_rank1": 16, "clip_hook": 16},
    )
    assert chart.shared
    polygons = re.findall(r'<polygon class="band [^"]*" points="([^"]*)"', svg_of(chart))
    depths = [{int(corner.split(",")[1]) for corner in corners.split()} for corners in polygons]
    edges = [{low, low + 15.0} for low in base.values()]
    assert depths == [set(chart.axis.depths(sorted(pair))) for pair in edges]


def test_metrics_are_chosen_if_they_are_numbers_that_vary(tmp_path):
    found = drawn(
        tmp_path,
        lambda arm, rank, step: {
            "constant": 1.0,
            "text": str(step),
            "flag": step % 2 == 0,
            "none": None,
            "varies": float(step),
            "steep": 10.0**step,
            **({"once": float(rank)} if step == 3 else {}),
        },
    )
    assert [(chart.metric, chart.axis.log) for chart in found] == [
        ("varies", False),
        ("steep", True),
    ]


def test_at_most_eight_metrics_are_chosen(tmp_path):
    found = drawn(tmp_path, lambda arm, rank, step: {f"m{k}": float(step + k) for k in range(12)})
    assert [chart.metric for chart in found] == [f"m{k}" for k in range(8)]


def test_a_phase_selects_and_without_one_the_last_counts(tmp_path):
    layout = record(tmp_path, {"one": 1}, 0, lambda *_: {})
    layout.stream("one", 0).unlink()
    writer = Writer(layout, header("one", 0, 1))
    for step in range(3):
        writer.write({"m": 10.0 + step}, repeat=0, step=step, phase="before")
        writer.write({"m": 20.0 + step}, repeat=0, step=step, phase="after")
        writer.write({"m": 99.0}, repeat=1, step=step, phase="after")
    writer.end("completed")
    plots = (Plot(metric="m", title="m", phase="before"), Plot(metric="m", title="m"))
    before, last = charts(toy(plots=plots), Tables.read(layout))
    assert before.panels[0].lines[0].points == {0: 10.0, 1: 11.0, 2: 12.0}
    assert last.panels[0].lines[0].points == {0: 20.0, 1: 21.0, 2: 22.0}


def test_a_floor_that_cannot_be_had_is_a_note_and_no_band(tmp_path):
    def broken(tables):
        raise ValueError("needs 20 permutations")

    unmeasured, odd = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": float(step)},
        Plot(metric="m", title="m", floor=broken),
        Plot(metric="m", title="m", floor=lambda tables: math.nan),
    )
    assert any("needs 20 permutations" in note for note in unmeasured.notes)
    assert any("nan" in note for note in odd.notes)
    for chart in (unmeasured, odd):
        assert 'class="floor"' not in svg_of(chart)


def test_the_floor_band_reaches_from_the_bottom_to_the_floor(tmp_path):
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": 10.0 ** (step - 9)},
        Plot(metric="m", title="m", log=True, floor=lambda tables: 1e-5),
    )
    band = re.search(r'class="floor" width="100%" y="([\d.]+)" height="([\d.]+)"', svg_of(chart))
    assert band
    top, height = map(float, band.groups())
    assert top + height == pytest.approx(chart.height, abs=0.2)
    assert top == pytest.approx(chart.height * (1 - chart.axis.place(1e-5)), abs=0.1)


def points_of(path):
    """Follow the moves of an SVG path; one list of absolute points per piece."""
    pieces = []
    for piece in filter(None, path.split("M")):
        start, _, moves = piece.partition("l")
        x, y = map(int, start.split())
        found = [(x, y)]
        numbers = list(map(int, moves.split()))
        for dx, dy in zip(numbers[::2], numbers[1::2], strict=True):
            x, y = x + dx, y + dy
            found.append((x, y))
        pieces.append(found)
    return pieces


def curve(drawing):
    path = re.search(r'<path class="line [^"]*" d="([^"]*)"', drawing)
    assert path
    return points_of(path.group(1))


def test_a_drawn_line_passes_through_its_values(tmp_path):
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": math.sin(step)},
        Plot(metric="m", title="m"),
        arms={"one": 1},
    )
    (piece,) = curve(svg_of(chart))
    assert len(piece) == 10
    for step, (x, y) in enumerate(piece):
        assert x == pytest.approx(1000 * step / 9, abs=1)
        assert y == pytest.approx(1000 * (1 - chart.axis.place(math.sin(step))), abs=1)


def test_a_line_is_broken_and_marked_where_it_is_not_finite(tmp_path):
    odd = {3: math.nan, 4: math.nan, 6: math.inf, 8: -math.inf}
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": odd.get(step, float(step))},
        Plot(metric="m", title="m"),
        arms={"one": 1},
    )
    drawing = svg_of(chart)
    # Steps 5, 7 and 9 stand alone: they have no line but a dot.
    assert [[x for x, _ in piece] for piece in curve(drawing)] == [[0, 111, 222]]
    dots = re.search(r'<path class="dots [^"]*" d="([^"]*)"', drawing)
    assert dots
    assert dots.group(1).count("M") == 6
    marks = re.findall(r'class="odd [^"]*" x="([\d.]+)%"[^>]*>(.)<', drawing)
    assert marks == [("33.3", "\u00d7"), ("66.7", "\u25b2"), ("88.9", "\u25bc")]
    assert "4 not finite" in drawing


def test_a_missing_step_joins_its_neighbours(tmp_path):
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": float(step)} if rank == 0 or step % 3 == 0 else {},
        Plot(metric="m", title="m"),
        arms={"clip_rank1": 2},
    )
    thin = [curve(part) for part in re.findall(r'<path class="line [^>]*>', svg_of(chart))][1]
    assert [[x for x, _ in piece] for piece in thin] == [[0, 333, 667, 1000]]


def panel(values):
    points = dict(enumerate(values))
    return Panel(lines=(Line(arms=("a",), label="rank 0", rank=0, points=points),))


@given(st.lists(st.floats(-1e6, 1e6), min_size=60, max_size=90), st.integers(8, 24))
def test_thinning_keeps_the_extremes_of_every_column(values, columns):
    data = svg.grid(panel(values), columns)
    assert len(data.steps) == 2 * columns
    assert data.steps == sorted(set(data.steps))
    edges = [len(values) * k // columns for k in range(columns + 1)]
    for k in range(columns):
        part = values[edges[k] : edges[k + 1]]
        assert sorted(data.values[0][2 * k : 2 * k + 2]) == [min(part), max(part)]


def test_thinning_never_loses_a_nan():
    values = [float(k) for k in range(1000)]
    values[637] = math.nan
    data = svg.grid(panel(values), 50)
    assert data.thinned
    assert sum(math.isnan(value) for value in data.values[0]) == 1


def test_what_fits_is_not_thinned():
    data = svg.grid(panel([1.0, 5.0, 2.0]), 8)
    assert (data.values, data.thinned) == ([[1.0, 5.0, 2.0]], False)


def test_a_drawing_has_a_title_and_a_description_with_numbers(tmp_path):
    (chart,) = drawn(
        tmp_path,
        lambda arm, rank, step: {"m": step + 0.25},
        Plot(metric="m", title="m"),
        arms={"one": 1},
    )
    drawing = ElementTree.fromstring(svg_of(chart))
    assert drawing.get("role") == "img"
    named = {element.get("id"): element.text for element in drawing}
    title, description = (named[name] for name in drawing.get("aria-labelledby", "").split())
    assert title == "a label"
    assert description == "m over steps 0 to 9, lines: one rank 0; values from 0.25 to 9.25."


def test_colours_tell_arms_apart_while_there_are_enough():
    few = [Arm(name=f"f{k}", role=Role.FAULTY, about="") for k in range(6)]
    few.append(Arm(name="r", role=Role.REFERENCE, about=""))
    chosen = colours(toy(arms=few))
    assert len(set(chosen.values())) == 7
    assert chosen["r"] == 0
    many = [*few, Arm(name="x", role=Role.FIXED, about="")]
    by_role = colours(toy(arms=many))
    assert {by_role[f"f{k}"] for k in range(6)} == {by_role["f0"]}
    assert len({by_role["f0"], by_role["x"], by_role["r"]}) == 3


def test_as_many_dashes_as_lines_in_a_panel():
    css = (Path(svg.__file__).parent / "assets" / "page.css").read_text(encoding="utf-8")
    patterns = re.findall(r"\.d(\d) \{ stroke-dasharray: ([^;]+);", css)
    assert [int(number) for number, _ in patterns] == list(range(1, svg.DASHES))
    assert len({pattern for _, pattern in patterns}) == len(patterns)
    assert charting.MOST_LINES <= svg.DASHES
