"""Every arm and program under the watcher: faulty ones are named, all others leave it silent."""

from __future__ import annotations

import pytest

from harness.causes import catalogue
from tests.watched.confusion import SILENT, markdown, matrix, watch, watch_alone
from tests.watched.truth import OTHER_CAUSE, SEEN_BY_AUDIT, UNSEEN, alone, truths

TRUE = truths()
ALONE = alone()
"""Arms that hang or raise: each is a run of its own."""
FAULTY = sorted(name for name, truth in TRUE.items() if truth.cause and not truth.unseen)
RIGHT = sorted(name for name, truth in TRUE.items() if truth.cause is None)
PLACED = [name for name in FAULTY if TRUE[name].place is not None]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    found = watch(tmp_path_factory.mktemp("confusion"), TRUE)
    print(markdown(found))
    return found


def test_the_tables_name_cases_that_there_are():
    assert {*OTHER_CAUSE, *UNSEEN, *SEEN_BY_AUDIT} <= {*TRUE, *ALONE}
    assert not set(UNSEEN) & SEEN_BY_AUDIT
    assert not set(TRUE) & set(ALONE)


def test_every_cause_of_an_arm_or_program_is_in_the_catalogue():
    wanted = {truth.cause for truth in TRUE.values() if truth.cause and not truth.unseen}
    assert wanted <= set(catalogue())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY)
def test_the_cause_of_a_fault_is_named(outcomes, name):
    assert outcomes[name].said == TRUE[name].cause, outcomes[name].answer["headline"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACED)
def test_a_divergence_is_found_where_it_begins(outcomes, name):
    assert outcomes[name].misplaced() == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_where_nothing_is_wrong(outcomes, name):
    assert outcomes[name].is_right, outcomes[name].answer["headline"]
    assert outcomes[name].answer["divergence"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(UNSEEN) & set(TRUE)))
def test_what_cannot_be_seen_is_not_called_something_else(outcomes, name):
    assert not outcomes[name].is_misnamed, outcomes[name].answer["headline"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, t in ALONE.items() if t.cause and not t.unseen])
def test_the_cause_of_a_hang_is_named(tmp_path, name):
    found = watch_alone(tmp_path, {name: ALONE[name]})[name]
    assert found.said == ALONE[name].cause, found.answer["headline"]


@pytest.mark.slow
def test_nine_of_ten_faults_are_named_and_none_wrongly(outcomes):
    counts = matrix(outcomes)
    faulty = {pair: count for pair, count in counts.items() if pair[0] != "nothing wrong"}
    named = sum(count for (true, said), count in faulty.items() if true == said)
    assert named >= 0.9 * sum(faulty.values())
    assert not [pair for pair in faulty if not pair[1].startswith("(") and pair[0] != pair[1]]
    assert set(said for true, said in counts if true == "nothing wrong") == {SILENT}
