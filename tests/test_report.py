"""The page of a run: what it says, that it says it offline and as text, and how large it gets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from harness.errors import RecordError
from harness.plan import Layout
from harness.record import Writer
from harness.report import html
from harness.report.wording import printable
from harness.scenario import Claim, Kind, Outcome, Plot, holds
from harness.tables import Tables
from harness.verdict import decide
from tests import report_runs
from tests.report_runs import ENVIRONMENT, EVIL, Parsed, evil_run, toy, toy_run


def page(run, environment=ENVIRONMENT, config="gpus: 4\n"):
    layout, scenario, tables, verdict = run
    html.write(layout, scenario, "toy", tables, verdict, environment, config)
    return layout.report.read_text(encoding="utf-8")


def parsed(source):
    result = Parsed()
    result.feed(source)
    result.close()
    return result


def words(run, **more):
    return " ".join(parsed(page(run, **more)).text.split())


def test_everything_a_verdict_holds_is_there_as_text(tmp_path):
    run = toy_run(tmp_path)
    _, scenario, _, verdict = run
    said = words(run)
    for part in (verdict.headline, scenario.title, "inconclusive", "pytorch/pytorch#22049"):
        assert part in said
    for claim in scenario.claims:
        finding = verdict.findings[claim.name]
        for part in (claim.text, claim.name, claim.kind.value, finding.reason):
            assert part in said
    for number in ("0.032", "9.1e-8", "3.52e5", "relative L2 distance", "0.14997884186649116"):
        assert number in said
    for fact in ("torch", "2.13.0+cpu", "0123abc", "node-1", "gpus: 4", "make judge run="):
        assert fact in said


def test_only_a_finding_against_expectation_is_marked(tmp_path):
    source = page(toy_run(tmp_path))
    marked = re.findall(r'<tr id="claim-(\w+)" class="off">', source)
    assert marked == ["eps_5fhelps"]


def test_a_turned_expectation_turns_the_badge_and_the_mark(tmp_path):
    claim = Claim(
        name="c", kind=Kind.COST, text="t", expects=Outcome.REFUTED, judge=lambda _: holds("r")
    )
    run = toy_run(tmp_path, claims=(claim,))
    source = page(run)
    assert '<span class="badge unexpected">not as expected</span>' in source
    assert re.findall(r'<tr id="claim-c" class="off">', source)


def test_nothing_is_fetched_from_anywhere(tmp_path):
    source = page(toy_run(tmp_path))
    result = parsed(source)
    links = [v for name, v in result.attributes if name in ("src", "href", "xlink:href", "action")]
    assert links
    assert [link for link in links if not link.startswith("#")] == []
    assert not re.findall(r"url\(|@import", source)


def test_every_link_on_the_page_leads_somewhere(tmp_path):
    result = parsed(page(toy_run(tmp_path)))
    ids = [value for name, value in result.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for name, value in result.attributes:
        if name == "href":
            assert value[1:] in ids
        if name == "aria-labelledby":
            assert set(value.split()) <= set(ids)


def test_elements_are_closed_in_order_and_drawings_are_well_formed(tmp_path):
    source = page(toy_run(tmp_path))
    assert parsed(source).unclosed == []
    drawings = re.findall(r'<svg class="chart".*?</svg></div>', source, re.S)
    assert len(drawings) == 2
    for drawing in drawings:
        ElementTree.fromstring(drawing.removesuffix("</div>"))


def test_a_hostile_text_in_any_field_stays_text(tmp_path):
    plain = parsed(page(toy_run(tmp_path / "plain")))
    run, fields = evil_run(tmp_path / "evil")
    result = parsed(page(run, {"k" + EVIL: "v" + EVIL, "nested": {EVIL: [EVIL]}}, "config " + EVIL))
    assert result.tags["script"] == plain.tags["script"]
    assert "img" not in result.tags
    assert not [name for name, _ in result.attributes if name.startswith("on")]
    said = "".join(result.text.split())
    for field in [*fields, "k" + EVIL, "v" + EVIL, "config " + EVIL]:
        assert "".join(printable(field).split()) in said


def test_what_no_encoding_carries_is_made_visible(tmp_path):
    run = toy_run(tmp_path, title="bell \x07, half \ud800, nul \x00")
    assert "bell \u2407, half \ufffd, nul \u2400" in words(run)


def test_failures_stand_before_the_claims(tmp_path):
    layout, scenario, tables, _ = toy_run(tmp_path)
    failure = "arm clip_rank1: rank 2 was killed by signal 9 after step 17"
    verdict = decide(scenario, "toy", tables, failures=[failure])
    said = words((layout, scenario, tables, verdict))
    assert 0 < said.index(failure) < said.index(scenario.claims[0].text)


def test_a_judge_that_raised_shows_its_trace(tmp_path):
    def judge(tables):
        raise ZeroDivisionError("by nothing")

    claims = (Claim(name="c", kind=Kind.COST, text="t", expects=Outcome.HOLDS, judge=judge),)
    said = words(toy_run(tmp_path, claims=claims, headline=lambda findings: findings["gone"]))
    assert "the judge raised ZeroDivisionError: by nothing" in said
    assert 'raise ZeroDivisionError("by nothing")' in said
    assert "KeyError: 'gone'" in said


def test_arms_say_how_each_rank_ended(tmp_path):
    layout, scenario, _, _ = toy_run(tmp_path)
    for rank in (1, 2, 3):
        layout.stream("clip_rank1", rank).unlink()
    cut = Writer(layout, report_runs.header("clip_rank1", 1, 4))
    cut.write({"loss": 1.0}, repeat=0, step=17)
    cut.close()
    failed = Writer(layout, report_runs.header("clip_rank1", 2, 4))
    failed.end("failed", "RuntimeError: boom")
    tables = Tables.read(layout)
    said = words((layout, scenario, tables, decide(scenario, "toy", tables)))
    for part in (
        "rank 0 completed",
        "rank 1 was cut off after step 17",
        "rank 2 failed before its first step: RuntimeError: boom",
        "rank 3 wrote no record",
        "ranks 0\u20133 completed",
    ):
        assert part in said


def test_an_arm_that_was_not_run_is_not_called_complete(tmp_path):
    layout, scenario, tables, _ = toy_run(tmp_path)
    plan = replace(tables.plan, arms=tables.plan.arms[:2])
    layout.plan.write_text(plan.to_json())
    tables = Tables.read(layout)
    row = re.search(
        r'id="arm-clip_5fhook".*?</tr>',
        page((layout, scenario, tables, decide(scenario, "toy", tables))),
        re.S,
    )
    assert row
    assert "not part of this run" in row.group()
    assert "completed" not in row.group()


def test_the_data_for_live_plots_is_strict_json_with_gaps_as_texts(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    source = page(toy_run(tmp_path))
    raw = re.search(r'id="data">(.*?)</script>', source, re.S)
    assert raw
    data = json.loads(raw.group(1), parse_constant=refuse)
    loss = data["panels"][1][0]
    values = {label: y for (label, *_), y in zip(loss["lines"], loss["y"], strict=True)}
    before = report_runs.metrics("clip_rank1", 2, 29)["loss"]
    assert values["clip_rank1, rank 2"][29:31] == [before, "nan"]
    expected = [report_runs.metrics("clip_rank1", 3, step)["loss"] for step in range(40)]
    assert values["clip_rank1, rank 3"] == expected


def test_a_large_run_stays_under_the_limit_and_keeps_its_charts(tmp_path):
    def noisy(arm, rank, step):
        seed = (int(arm.removeprefix("arm")) * 8 + rank) * 80 + step
        return {f"metric{k}": (seed * (2 * k + 3001) % 8191) / 8191 for k in range(8)}

    scenario = toy(plots=())
    names = [f"arm{k}" for k in range(12)]
    arms = [replace(scenario.arms[1], name=name) for name in names]
    scenario = toy(plots=(), arms=arms)
    layout = report_runs.record(tmp_path, dict.fromkeys(names, 8), 80, noisy)
    tables = Tables.read(layout)
    source = page((layout, scenario, tables, decide(scenario, "toy", tables)))
    assert len(source.encode()) < html.LIMIT
    assert source.count("<figure>") == 8
    assert source.count('class="plot"') == 8 * 12


@pytest.mark.parametrize("limit", [300_000, 150_000, 80_000, 45_000])
def test_a_tight_limit_is_kept_by_drawing_less_never_by_saying_less(tmp_path, monkeypatch, limit):
    run = toy_run(tmp_path, plots=tuple(Plot(metric="loss", title=f"plot {k}") for k in range(60)))
    monkeypatch.setattr(html, "LIMIT", limit)
    source = page(run)
    assert limit / 4 < len(source.encode()) < limit
    said = " ".join(parsed(source).text.split())
    for claim in run[1].claims:
        assert claim.text in said
    shown = source.count("<figure>")
    if shown < 60:
        assert f"{60 - shown} more charts did not fit" in said


def test_no_records_at_all_still_make_a_page(tmp_path):
    layout, scenario, tables, _ = toy_run(tmp_path)
    empty = Tables(tables.plan, {})
    said = words((layout, scenario, empty, decide(scenario, "toy", empty)))
    assert "no records of rank 1 in arm clip_rank1" in said
    assert "No arm of this run recorded this metric." in said


def test_a_second_page_replaces_the_first(tmp_path):
    layout, scenario, tables, verdict = toy_run(tmp_path)
    page((layout, scenario, tables, verdict))
    assert "second headline" in page(
        (layout, scenario, tables, replace(verdict, headline="second headline"))
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "plan.json",
        "records",
        "report.html",
    ]


def test_a_page_that_cannot_be_written_is_named(tmp_path):
    _, scenario, tables, verdict = toy_run(tmp_path / "run")
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(RecordError, match=r"cannot write .*file/run/report\.html"):
        html.write(Layout(blocker / "run"), scenario, "toy", tables, verdict, {}, "")


def test_the_licence_of_the_plotting_library_is_on_the_page(tmp_path):
    source = page(toy_run(tmp_path))
    assert "Copyright (c) 2022 Leon Sorokin" in source
    assert "The above copyright notice and this permission notice shall be included" in source


def test_a_chart_may_name_a_metric_nobody_recorded(tmp_path):
    said = words(toy_run(tmp_path, plots=(Plot(metric="gone", title="Gone"),)))
    assert "No arm of this run recorded this metric." in said


def test_reports_import_nothing_heavy():
    code = (
        "import sys, harness.report.html, harness.report.junit, harness.report.markdown\n"
        "heavy = {'torch', 'pandas', 'numpy', 'hydra', 'omegaconf', 'rich', 'wandb'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def test_the_parser_of_these_tests_sees_what_it_should():
    result = parsed('<p><a href="http://x">y</a><b>z</p>')
    assert result.unclosed == ["b"]
    assert ("href", "http://x") in result.attributes
    assert isinstance(result, HTMLParser)
