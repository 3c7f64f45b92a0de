"""The page of a sweep, made from rows: what it says, what it links to, how large it gets."""

from __future__ import annotations

import html
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.report import heat, sweep, sweep_figures, trellis

KEYS = ("gpus", "scenario.imbalance", "seed")


def point(number: int, values: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    fields = {
        "point": number,
        **dict(zip(KEYS, values, strict=True)),
        "state": "as_expected",
        "problem": None,
        "run": f"toy/r{number}",
        "report": None,
        "reused": False,
        "seconds": 1.5,
    }
    return fields | more


def rows(points: list[dict[str, Any]], arms: int = 2) -> list[dict[str, Any]]:
    return [
        {
            **about,
            "arm": f"arm{k}",
            "role": "faulty" if k else "fixed",
            "loss_reference": "one",
            "loss_floor": 1e-16,
            "loss_gap_last": 10.0 ** (-k - about["gpus"]) * (1 + about["seed"]),
            "loss_drift_last": about["scenario.imbalance"] * 1e-3 * k,
        }
        for about in points
        for k in range(arms)
    ]


def findings(points: list[dict[str, Any]], claims: int = 2) -> list[dict[str, Any]]:
    return [
        {
            **about,
            "claim": f"claim{k}",
            "outcome": "holds" if about["scenario.imbalance"] else "unknown",
            "expects": "holds",
            "effect": 1e-3 * k,
            "floor": 1e-16,
            "reason": "because <b>",
        }
        for about in points
        for k in range(claims)
    ]


def grid(gpus=(2, 4), imbalance=(0, 0.25, 0.5), seeds=(1, 2)) -> list[dict[str, Any]]:
    values = [(g, i, s) for g in gpus for i in imbalance for s in seeds]
    return [point(number, value) for number, value in enumerate(values, 1)]


def page(points: list[dict[str, Any]], /, **more: Any) -> sweep.Page:
    fields = {
        "name": "toy",
        "title": "a <toy>",
        "claims": {"claim1": "it <breaks>"},
        "swept": KEYS,
        "points": points,
        "arms": rows(points),
        "findings": findings(points),
    }
    return sweep.Page(**{**fields, **more})


class Tags(HTMLParser):
    """Collects elements, and checks that every one is closed in its order."""

    VOID = ("meta", "link", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(text)
    assert parser.open == []
    return parser.seen


def test_the_page_is_whole_offline_and_without_scripts(tmp_path):
    text = sweep.render(page(grid()), tmp_path)
    found = tags(text)
    assert not [tag for tag, _ in found if tag in ("script", "link", "img", "iframe")]
    links = [attrs["href"] for tag, attrs in found if tag == "a" and attrs.get("href")]
    assert not [link for link in links if ":" in link]
    ids = [attrs["id"] for _, attrs in found if attrs.get("id")]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert "because <b>" not in text
    assert "a <toy>" not in text
    assert "it &lt;breaks&gt;" in text


def test_points_link_to_their_reports_by_relative_paths(tmp_path):
    folder = tmp_path / "results" / "sweeps" / "toy-1"
    report = tmp_path / "results" / "toy" / "run #1" / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("")
    points = grid(gpus=(2,), imbalance=(0.5,))
    points[0]["report"] = str(report)
    points[1]["report"] = str(report.with_name("gone.html"))
    found = tags(sweep.render(page(points), folder))
    links = [attrs["href"] for tag, attrs in found if tag == "a" and attrs.get("href")]
    # two claims and the table of points, of the one point whose report is there
    assert links.count("../../toy/run%20%231/report.html") == 3
    assert not [link for link in links if "gone" in link]


def test_failed_points_are_on_top_in_the_matrix_and_in_the_table(tmp_path):
    points = grid()
    points[3] |= {"state": "failed", "problem": "rank 1 raised <ValueError>", "run": None}
    points[4] |= {"state": "not run", "run": None}
    sound = [item for item in points if item["point"] not in (4, 5)]
    text = sweep.render(page(points, arms=rows(sound), findings=findings(sound)), tmp_path)
    assert "2 of 12 points have no sound run" in text
    assert text.count("rank 1 raised &lt;ValueError&gt;") == 2
    # both claims, both points
    assert text.count('class="absent"') == 4
    assert "10 as expected, 1 failed, 1 not run" in text


def cells(text: str) -> list[tuple[str, str]]:
    """Return (row, sign) of the findings matrix."""
    body = text.partition('class="matrix"')[2].partition("</table>")[0].partition("<tbody>")[2]
    found = []
    for line in body.split("<tr>")[1:]:
        name = re.search("<b>(.*?)</b>", line)
        assert name
        found += [(name[1], sign) for sign in re.findall(r"<td.*?>([✓✕?–])</", line)]
    return found


def test_the_matrix_has_each_outcome_in_its_place_and_marks_the_unexpected(tmp_path):
    points = grid(gpus=(2,), imbalance=(0, 0.5), seeds=(1, 2))
    found = findings(points)
    found[-1]["outcome"] = "refuted"
    text = sweep.render(page(points, findings=found), tmp_path)
    assert cells(text) == [
        *[("claim0", sign) for sign in "??✓✓"],
        *[("claim1", sign) for sign in "??✓✕"],
    ]
    # unknown is not unexpected
    assert text.count('<td class="off">') == 1
    assert "unknown in 2, holds in 1, refuted in 1" in text
    heads = re.findall(r'colspan="(\d)">(.*?)<', text)
    assert heads == [
        *[("4", "2"), ("2", "0"), ("2", "0.5")],
        *[("1", "1"), ("1", "2"), ("1", "1"), ("1", "2")],
    ]


def test_no_page_passes_the_limit(tmp_path):
    points = grid(gpus=(2, 4), imbalance=tuple(k / 10 for k in range(8)), seeds=range(20))
    long = [item | {"reason": "a reason " * 300} for item in findings(points, claims=6)]
    text = sweep.render(page(points, arms=rows(points, arms=4), findings=long), tmp_path)
    assert len(text.encode()) < sweep.LIMIT
    assert len(cells(text)) == 6 * len(points)
    assert "class='trellis'" in text


def test_points_that_do_not_fit_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "LIMIT", 150_000)
    points = grid(gpus=(2, 4), imbalance=(0, 0.5), seeds=range(300))
    text = sweep.render(page(points, arms=[], findings=findings(points)), tmp_path)
    assert len(cells(text)) == 2 * 500
    assert text.count("The first 500 of 1200 points") == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"arms": [], "findings": []},
        {"swept": ()},
        {"swept": ("seed",)},
        {"points": grid()[:1], "arms": [], "findings": []},
    ],
)
def test_a_page_without_much_to_show_is_a_page(tmp_path, changes):
    tags(sweep.render(page(grid(), **changes), tmp_path))


def test_the_seed_is_an_axis_only_where_nothing_else_is_swept():
    points = grid()
    assert sweep_figures.axes(KEYS, points) == ["gpus", "scenario.imbalance"]
    assert sweep_figures.axes(("seed",), points) == ["seed"]
    assert (
        sweep_figures.axes(("scenario.label", "seed"), [{"scenario.label": "a", "seed": 1}]) == []
    )


def test_repeats_with_other_seeds_are_a_median_and_a_range():
    spot = trellis.Spot(x=1.0, values=(3.0, 1.0, 10.0))
    assert (spot.middle, spot.finite) == (3.0, [1.0, 3.0, 10.0])
    assert trellis.Spot(x=1.0, values=(1.0, 4.0)).middle == 2.5
    assert trellis.Spot(x=1.0, values=(1.0, math.nan)).middle is None
    assert trellis.Spot(x=1.0, values=()).middle is None


def test_a_curve_breaks_and_is_marked_where_a_value_is_not_finite():
    spots = tuple(
        trellis.Spot(x=float(x), values=(v,)) for x, v in enumerate([1.0, 2.0, math.nan, 2.0, 1.0])
    )
    panel = trellis.Panel(title="p", curves=(trellis.Curve(label="", colour=1, spots=spots),))
    across = trellis.Across(key="k", values=tuple(float(x) for x in range(5)))
    text = trellis.draw(panel, across, trellis.axis_of([panel]), name="n", what="w")
    lines = re.findall(r'class="line c1" d="(M[^"]*)"', text)
    assert [line.count(",") for line in lines] == [2, 2]
    assert text.count('class="odd') == 1
    assert "2: not finite" in html.unescape(text)


def test_across_is_logarithmic_where_the_values_would_crowd():
    across = trellis.Across(key="k", values=(1.0, 10.0, 100.0))
    assert across.log
    assert [round(across.place(x)) for x in across.values] == [0, 500, 1000]
    even = trellis.Across(key="k", values=(0.0, 0.25, 0.5))
    assert not even.log
    assert [even.place(x) for x in even.values] == [0.0, 500.0, 1000.0]


def test_the_heat_map_prints_values_and_names_what_has_none():
    found = {
        ("2", "0"): heat.Cell(value=1e-16),
        ("2", "1"): heat.Cell(value=1.0),
        ("4", "0"): heat.Cell(value=math.nan),
        ("4", "1"): heat.Cell(value=None, problem="failed"),
    }
    colours = heat.scale([1e-16, 1.0, math.nan, 0.0])
    assert colours == heat.Scale(low=1e-16, high=1.0)
    text = heat.draw("arm", ("gpus", "x"), ["2", "4"], ["0", "1"], found, colours)
    assert re.findall(r'class="cell \w+"[^>]*>([^<]*)<', text) == ["1e-16", "1", "NaN", "failed"]
    assert text.count('class="bad"') == 2
    assert heat.RAMP[0] in text
    assert heat.RAMP[-1] in text


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_ramp_gets_lighter_all_the_way_and_its_text_stays_legible():
    found = [luminance(colour) for colour in heat.RAMP]
    assert found == sorted(found)
    inks = {"dark": luminance("#ffffff"), "light": luminance("#111111")}
    scale = heat.Scale(low=1.0, high=1e10)
    for k, light in enumerate(found):
        value = 10.0 ** (k + 0.5)
        assert scale.colour(value) == k
        cell = {("a", "b"): heat.Cell(value=value)}
        text = heat.draw("", ("r", "c"), ["a"], ["b"], cell, scale)
        ink = re.search(r'class="cell (\w+)"', text)
        assert ink
        high, low = sorted((light, inks[ink[1]]), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_a_fold_in_the_heat_map_keeps_the_worst():
    points = grid(gpus=(2,), imbalance=(0.5,), seeds=(1, 2, 3))
    points[2] |= {"state": "failed"}
    found = [about | {"m": value} for about, value in zip(points, [1.0, math.nan], strict=False)]
    kept = sweep_figures._cells("m", ("gpus", "scenario.imbalance"), points, found)
    assert math.isnan(kept["2", "0.5"].value)
    found = [about | {"m": value} for about, value in zip(points, [5.0, 1.0], strict=False)]
    kept = sweep_figures._cells("m", ("gpus", "scenario.imbalance"), points, found)
    assert kept == {("2", "0.5"): heat.Cell(value=5.0)}


def test_curves_stand_beside_the_floor_of_their_reference():
    points = grid(seeds=(1,))
    figures = sweep_figures.losses(KEYS, rows(points), most=99)
    assert [re.search("<h3>(.*?)</h3>", figure.html)[1] for figure in figures] == [
        f"{title}, over {key}"
        for title in sweep_figures.METRICS.values()
        for key in ("gpus", "imbalance")
    ]
    assert figures[0].html.count('class="rounding"') == 3  # a panel for each imbalance
    assert figures[1].html.count('class="rounding"') == 2  # a panel for each gpus


def test_panels_that_do_not_fit_are_counted():
    figures = sweep_figures.losses(KEYS, rows(grid(seeds=(1,))), most=2)
    assert [figure.left_out for figure in figures] == [1, 0, 1, 0]


def test_files_are_written_under_their_name(tmp_path):
    sweep.write(Path(tmp_path) / "sweep.html", page(grid()))
    assert (tmp_path / "sweep.html").read_text().startswith("<!doctype html>")
