"""The reports that are text: JUnit, markdown, their words, and a scenario's highlighted source."""

from __future__ import annotations

import html
import inspect
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import plan, record, scenario, tables, verdict
from harness.errors import RecordError
from harness.plan import Layout
from harness.report import junit, markdown
from harness.report.source import sources
from harness.report.wording import judged, number, printable, rank_list, tally
from harness.scenario import Claim, Kind, Outcome, holds, refuted, unknown
from harness.verdict import Conclusion, Verdict
from tests import report_runs
from tests.report_runs import EVIL, evil_run, toy, toy_run

OUTCOMES = {Outcome.HOLDS: holds, Outcome.REFUTED: refuted, Outcome.UNKNOWN: unknown}
ANY_TEXT = st.text(st.characters(), max_size=30)


def case_of(found, expects):
    finding = OUTCOMES[found]("a reason")
    claim = Claim(name="c", kind=Kind.COST, text="t", expects=expects, judge=lambda _: finding)
    result = Verdict(
        run_id="r1",
        scenario="toy",
        conclusion=Conclusion.AS_EXPECTED,
        headline="h",
        findings={"c": finding},
    )
    suite = ElementTree.fromstring(junit.text(toy(claims=(claim,)), result))[0]
    return suite, suite.find("testcase")


@pytest.mark.parametrize("found", list(Outcome))
@pytest.mark.parametrize("expects", [Outcome.HOLDS, Outcome.REFUTED])
def test_a_case_passes_only_if_the_finding_is_the_expected_one(found, expects):
    suite, case = case_of(found, expects)
    failures, errors = case.findall("failure"), case.findall("error")
    if found is expects:
        assert (len(failures), len(errors)) == (0, 0)
    elif found is Outcome.UNKNOWN:
        assert (len(failures), len(errors)) == (0, 1)
    else:
        assert (len(failures), len(errors)) == (1, 0)
    assert suite.get("failures") == str(len(failures))
    assert suite.get("errors") == str(len(errors))
    assert suite.get("tests") == "1"


def test_a_failed_rank_is_an_error_even_if_every_claim_came_out():
    scenario_ = toy(claims=())
    result = Verdict(
        run_id="r1",
        scenario="toy",
        conclusion=Conclusion.INCONCLUSIVE,
        headline="h",
        findings={},
        failures=("rank 2 was killed", "rank 3 waited"),
    )
    suite = ElementTree.fromstring(junit.text(scenario_, result))[0]
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")
    case = suite.find("testcase")
    assert case.find("error").get("message") == "rank 2 was killed"
    assert case.find("system-err").text == "rank 2 was killed\nrank 3 waited"


def test_the_junit_file_names_every_claim_with_its_numbers(tmp_path):
    layout, scenario_, _, result = toy_run(tmp_path)
    junit.write(layout, scenario_, result)
    suite = ElementTree.parse(layout.junit).getroot()[0]
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    assert list(cases) == [claim.name for claim in scenario_.claims]
    said = cases["clip_is_lost"].find("system-out").text
    for part in ("effect: 0.032 relative L2 distance", "floor: 9.1e-8", "digest = '9f3a5c'"):
        assert part in said


def test_a_junit_file_that_cannot_be_written_is_named(tmp_path):
    _, scenario_, _, result = toy_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write .*junit\.xml"):
        junit.write(Layout(tmp_path / "file" / "run"), scenario_, result)


def test_hostile_texts_come_through_junit_whole(tmp_path):
    (_, scenario_, _, result), _ = evil_run(tmp_path)
    suite = ElementTree.fromstring(junit.text(scenario_, result))[0]
    said = "".join(suite.itertext()) + " ".join(
        value for element in suite.iter() for value in element.attrib.values()
    )
    for field in ("text", "reason", "unit", "failure", "headline", "raised"):
        assert f"{field} {printable(EVIL)}" in said
    assert [element.tag for element in suite.iter() if element.tag == "img"] == []


@given(name=ANY_TEXT, reason=ANY_TEXT, failure=ANY_TEXT, evidence=ANY_TEXT)
def test_any_text_is_read_back_from_junit(name, reason, failure, evidence):
    finding = refuted(reason, evidence={"e": evidence})
    claim = Claim(
        name=name, kind=Kind.COST, text="t", expects=Outcome.HOLDS, judge=lambda _: finding
    )
    result = Verdict(
        run_id="r1",
        scenario="toy",
        conclusion=Conclusion.UNEXPECTED,
        headline="h",
        findings={name: finding},
        failures=(failure,),
    )
    first, last = ElementTree.fromstring(junit.text(toy(claims=(claim,)), result))[0].findall(
        "testcase"
    )
    assert first.get("name") == printable(name)
    assert first.find("failure").get("message").endswith(printable(reason))
    assert (last.find("system-err").text or "") == printable(failure)


def cells(line):
    """Split a row as GitHub does: at bars that no backslash precedes."""
    return re.split(r"(?<!\\)\|", line.strip())[1:-1]


def test_markdown_has_one_whole_row_per_claim(tmp_path):
    _, scenario_, _, result = toy_run(tmp_path)
    said = markdown.text(scenario_, result)
    rows = [line for line in said.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(scenario_.claims)
    assert {len(cells(row)) for row in rows} == {8}
    first = [cell.strip() for cell in cells(rows[2])]
    assert first[1:7] == [
        "symptom",
        "holds",
        "holds",
        "0.032 relative L2 distance",
        "9.1e-8",
        "3.52e5",
    ]
    assert cells(rows[4])[2].strip() == "**unknown**"
    assert said.startswith(f"**{result.headline}**\n")


@given(ANY_TEXT | st.just(EVIL) | st.just("a|b\n- c\r\n# d\\"))
def test_no_text_breaks_out_of_its_cell(raw):
    finding = holds(raw, unit=raw, effect=1.0)
    claim = Claim(
        name="c", kind=Kind.COST, text=raw, expects=Outcome.HOLDS, judge=lambda _: finding
    )
    result = Verdict(
        run_id="r1",
        scenario="toy",
        conclusion=Conclusion.AS_EXPECTED,
        headline="h",
        findings={"c": finding},
    )
    said = markdown.text(toy(claims=(claim,)), result)
    rows = [line for line in said.split("\n") if line.startswith("|")]
    assert len(said.split("\n")) == 8
    assert {len(re.sub(r"\\.", "", row).split("|")) for row in rows} == {10}
    assert "<" not in said


def test_markdown_lists_the_failures(tmp_path):
    _, scenario_, _, result = toy_run(tmp_path)
    said = markdown.text(scenario_, replace(result, failures=("rank 2 was killed",)))
    assert "- rank 2 was killed\n" in said
    assert "Failures" not in markdown.text(scenario_, result)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "\u2013"),
        (0.0, "0"),
        (-0.0, "0"),
        (3.0, "3"),
        (1234567.0, "1.23e6"),
        (12345, "12,345"),
        (2.7182818, "2.72"),
        (9.1e-8, "9.1e-8"),
        (-4.25e-12, "-4.25e-12"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_are_short(value, expected):
    assert number(value) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([1], "rank 1"),
        ([0, 1], "ranks 0, 1"),
        ([3, 2, 1, 0], "ranks 0\u20133"),
        ([0, 2, 3, 4, 9], "ranks 0, 2\u20134, 9"),
    ],
)
def test_ranks_are_ranges(ranks, expected):
    assert rank_list(ranks) == expected


def test_a_turn_of_direction_is_shown_and_not_obeyed():
    assert printable("a\u202eb\u2066c") == "a[U+202E]b[U+2066]c"
    assert printable("\u2028\u00e9\u4e2d\t\n") == "\u2028\u00e9\u4e2d\t\n"


def test_a_tally_counts_every_outcome(tmp_path):
    _, scenario_, _, result = toy_run(tmp_path)
    assert tally(judged(scenario_, result)) == "1 claim holds, 1 is refuted, 1 is unknown"
    none = replace(result, findings={})
    assert tally(judged(scenario_, none)) == "3 claims are unknown"
    assert tally([]) == "no claims"


def plain(markup):
    """Return the text of highlighted source, without the markup."""
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


@pytest.mark.parametrize("module", [plan, record, scenario, tables, verdict])
def test_highlighting_changes_no_character(module):
    names = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and hasattr(value, "__name__")
    ]

    def run(rank, arm, params):
        pass

    run.__module__ = module.__name__
    found, absent = sources(toy(run=run, differs=tuple(names)))
    assert absent == []
    assert len(found) == len(names) > 3
    for source in found:
        lines = inspect.getsource(getattr(module, source.name)).splitlines()
        assert plain(source.html()).splitlines() == lines
        assert source.lines == tuple(lines)


def test_exactly_the_lines_that_read_the_arm_are_marked():
    (source,), _ = sources(toy())
    marked = [source.lines[number - source.first].strip() for number in source.branches]
    assert marked == [
        'bound = 0.5 if arm["clip"] else None',
        'if arm.get("edit") == "rank 0":',
        'rank.log(step=0, note=f"edited by {arm.name}")',
    ]
    numbers = re.findall(r'<mark class="row" data-n="(\d+)"', source.html())
    assert [int(number_) for number_ in numbers] == source.branches
    file = Path(report_runs.__file__).read_text().splitlines()
    assert file[source.first - 1].startswith("def run(")


def test_words_get_their_colour():
    (source,), _ = sources(toy())
    shown = source.html()
    for mark in (
        '<i class="k">def</i> <i class="d">run</i>',
        '<i class="c"># the next line is where the arms differ</i>',
        '<i class="n">0.5</i>',
        '<i class="s">&quot;clip&quot;</i>',
    ):
        assert mark in shown


def test_a_function_without_source_is_named_not_left_out():
    found, absent = sources(toy(differs=("run", "nowhere", "run.inner")))
    assert [source.name for source in found] == ["run"]
    assert absent == ["nowhere", "run.inner"]
