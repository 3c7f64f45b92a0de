"""Predictions: what is drawn, how it is scored, and that nobody can change an answer afterwards."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

import scenarios
from harness.errors import HarnessError, PrerequisiteError, UsageError
from harness.parameters import build, violations
from harness.scenario import holds
from launch import newest
from launch.compose import values
from launch.corpus.pool import Pool, Stoppable
from launch.devices import choose
from launch.predict import answers, history, questions, radar, report, score, seal, session
from launch.predict.__main__ import check, main
from launch.predict.answers import Answer
from launch.predict.asking import ask
from launch.predict.dimensions import FAMILIES, SCENARIOS, Dimension, dimension, shelves
from launch.predict.history import Item, Sitting
from launch.predict.session import Found
from tests.ended_runs import ended
from tests.launching import GIVE_UP_S, MARK, ROOT, assert_no_orphans, environment

NAMES = newest.own()
PROTOCOL = {"holds": 0.24, "refuted": 0.46, "partly": 0.30}
"""Base rates for which the scores of scripted players are known beforehand."""


def test_every_scenario_feeds_a_dimension_and_no_entry_is_idle():
    assert [name for name in NAMES if dimension(name) is None] == [], "add its family to FAMILIES"
    assert set(SCENARIOS) <= set(NAMES)
    assert set(FAMILIES) <= {scenarios.load(name).family for name in NAMES}
    assert min(len(found) for found in shelves(NAMES).values()) >= 2


def test_every_claim_can_be_asked_for_and_some_statement_is_true_in_part():
    expected = set()
    for name in NAMES:
        asked = questions.topics(name)
        expected |= {topic.expected for topic in asked}
        covered = {item.claim for topic in asked for item in topic.by}
        assert covered == {claim.name for claim in scenarios.load(name).claims}, name
        assert len({topic.key for topic in asked}) == len(asked)
    assert expected == {"holds", "refuted", "partly"}


def test_base_rates_are_how_often_a_draw_has_each_answer():
    rates = questions.base_rates(NAMES)
    assert math.isclose(sum(rates.values()), 1.0)
    drawn = [
        question.topic.expected
        for number in range(150)
        for question in questions.draw(NAMES, random.Random(number))
    ]
    for name, rate in rates.items():
        error = math.sqrt(rate * (1 - rate) / len(drawn))
        assert abs(drawn.count(name) / len(drawn) - rate) < 4 * error, name


def test_two_of_each_dimension_are_drawn_with_parameters_of_their_own():
    first = questions.draw(NAMES, random.Random(1))
    again = questions.draw(NAMES, random.Random(1))
    other = questions.draw(NAMES, random.Random(2))
    assert first == again
    assert [q.topic.key for q in first] != [q.topic.key for q in other]
    count = {item: sum(q.dimension is item for q in first) for item in Dimension}
    assert set(count.values()) == {2}
    assert len({q.topic.scenario for q in first}) == 10
    assert len({q.seed for q in first}) == 10


def test_drawn_parameters_are_legal_and_measure_as_well_as_the_defaults():
    changed = 0
    for number in range(20):
        for question in questions.draw(NAMES, random.Random(number)):
            scenario = scenarios.load(question.topic.scenario)
            given = dict(question.params)
            assert violations(scenario.params, given) == []
            assert not scenario.check(build(scenario.params, given), question.gpus)
            default = values(question.topic.scenario)
            assert set(question.drawn) == {key for key in given if given[key] != default[key]}
            assert not set(question.drawn) & set(questions.PRECISION)
            for name in question.drawn:
                assert not isinstance(default[name], str | bool | list | None)
            changed += bool(question.drawn)
    assert changed > 100, "hardly anything was drawn anew"


@dataclasses.dataclass(frozen=True)
class Params:
    scale: float = dataclasses.field(metadata={"low": 0.9, "high": 1.05})
    kind: int = dataclasses.field(metadata={"values": (1, 2)})
    permutations: int


def test_a_parameter_stays_within_its_bounds():
    scenario = dataclasses.replace(scenarios.load("loss_gap"), params=Params)
    default = {"scale": 1.0, "kind": 1, "permutations": 20}
    drawn = [questions.vary(scenario, default, random.Random(n)) for n in range(200)]
    assert {item["kind"] for item in drawn} == {1}
    assert {item["permutations"] for item in drawn} == {20}
    scales = {item["scale"] for item in drawn}
    assert min(scales) >= 0.9
    assert max(scales) <= 1.05
    assert len(scales) > 5


def pool(rates):
    """Every question with its chance of being drawn, and its answer."""
    if rates is PROTOCOL:
        return [(weight, outcome) for outcome, weight in PROTOCOL.items()]
    filled = [found for found in shelves(NAMES).values() if found]
    return [
        (1 / (len(filled) * len(found) * len(asked)), topic.expected)
        for found in filled
        for name in found
        for asked in [questions.topics(name)]
        for topic in asked
    ]


def played(player, rates):
    """The score of somebody who answers every question, before it is drawn towards 5."""
    mean = sum(
        weight * score.verdict_skill(player(outcome), outcome, rates)
        for weight, outcome in pool(rates)
    )
    return score.raw_score([mean])


@pytest.mark.parametrize("rates", [questions.base_rates(NAMES), PROTOCOL], ids=["ours", "known"])
def test_scripted_players_land_where_they_should(rates):
    spread = 1 - sum(rate**2 for rate in rates.values())

    def clipped(skill):
        return min(10.0, max(0.0, 5 + 5 * skill))

    uniform = played(lambda outcome: dict.fromkeys(rates, 1 / 3), rates)
    assert uniform == pytest.approx(clipped(1 - (2 / 3) / spread))
    for always in ("refuted", "holds", "partly"):
        wrong = 2 * (1 - rates[always])
        found = played(lambda outcome, said=always: {said: 1.0}, rates)
        assert found == pytest.approx(clipped(1 - wrong / spread)), always
    assert played(lambda outcome: rates, rates) == pytest.approx(5.0)
    assert played(lambda outcome: {outcome: 1.0}, rates) == pytest.approx(10.0)


def test_the_players_of_the_protocol_have_its_scores():
    found = {
        "uniform": played(lambda outcome: dict.fromkeys(PROTOCOL, 1 / 3), PROTOCOL),
        "always refuted": played(lambda outcome: {"refuted": 1.0}, PROTOCOL),
        "always reproduced": played(lambda outcome: {"holds": 1.0}, PROTOCOL),
    }
    assert {name: round(value, 1) for name, value in found.items()} == {
        "uniform": 4.8,
        "always refuted": 1.6,
        "always reproduced": 0.0,
    }


def test_nobody_gains_by_saying_what_they_do_not_believe():
    rng = random.Random(3)

    def drawn():
        raw = [rng.random() for _ in score.OUTCOMES]
        return {name: value / sum(raw) for name, value in zip(score.OUTCOMES, raw, strict=True)}

    for _ in range(50):
        belief, said = drawn(), drawn()

        def expected(answer, belief=belief):
            return sum(p * score.brier(answer, outcome) for outcome, p in belief.items())

        assert expected(belief) < expected(said)


def test_an_interval_costs_its_width_and_ten_for_each_power_of_ten_it_misses():
    assert score.interval_score(1e-3, 1e-1, 1e-2) == pytest.approx(2)
    assert score.interval_score(1e-1, 1e-3, 1e-2) == pytest.approx(2)
    assert score.interval_score(1e-3, 1e-1, 1.0) == pytest.approx(2 + 10)
    assert score.interval_score(1e-3, 1e-1, 1e-5) == pytest.approx(2 + 20)
    assert score.interval_score(0, 1e-16, 0.0) == pytest.approx(1)


def test_the_usual_interval_has_no_skill_on_the_effects_it_is_made_of():
    rng = random.Random(1)
    effects = [10 ** rng.uniform(-17, 2) for _ in range(200)]
    usual = score.usual_interval(effects)
    inside = sum(usual[0] <= effect <= usual[1] for effect in effects) / len(effects)
    assert inside == pytest.approx(0.8, abs=0.02)
    skills = [score.number_skill(usual, effect, effects) for effect in effects]
    assert statistics.fmean(skills) == pytest.approx(0, abs=1e-9)
    assert score.number_skill((1.0, 1.0), 1.0, effects) == 1.0
    assert score.number_skill((0.1, 10.0), 1.0, []) > 0


def test_few_items_are_drawn_towards_five_and_stand_nowhere():
    assert score.dimension_score([]) == 5.0
    assert score.dimension_score([1.0, 1.0]) == pytest.approx((2 * 10 + 2 * 5) / 4)
    assert score.dimension_score([-9.0] * 8) == pytest.approx((8 * 0 + 2 * 5) / 10)
    assert score.standing([1.0] * (score.ENOUGH - 1)) == score.FEW
    assert score.standing([1.0] * 10) == score.ABOVE
    assert score.standing([-1.0] * 10) == score.BELOW
    assert score.standing([1.0, -0.6] * 5) == score.OPEN


RATES = {"holds": 0.5, "refuted": 0.4, "partly": 0.1}


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("", RATES),
        ("r", {"refuted": 1.0}),
        ("70 20 10", {"holds": 0.7, "refuted": 0.2, "partly": 0.1}),
        ("80%, 20%", {"holds": 0.8, "refuted": 0.2}),
    ],
)
def test_probabilities_are_typed_as_percentages_or_letters(typed, given):
    assert answers.probabilities(typed, RATES) == given


@pytest.mark.parametrize("typed", ["70 20", "x", "100 100", "50", "60 60 -20 0"])
def test_what_are_no_probabilities_is_refused(typed):
    with pytest.raises(ValueError, match="type"):
        answers.probabilities(typed, RATES)


def test_intervals_are_two_sizes_in_any_order():
    assert answers.interval("0.1 1e-3") == (1e-3, 0.1)
    assert answers.interval("1e-3..0.1") == (1e-3, 0.1)
    assert answers.interval("") is None
    for typed in ("1", "a b", "-1 2", "1 2 3"):
        with pytest.raises(ValueError, match=r"type|sizes"):
            answers.interval(typed)


def test_an_answer_is_whole_or_refused():
    assert Answer(probabilities={"holds": 0.99}).probabilities["holds"] == 1.0
    for given in ({"holds": 0.5}, {"holds": 1.5, "refuted": -0.5}, {"maybe": 1.0}):
        with pytest.raises(ValueError, match="probabilities"):
            Answer(probabilities=given)


def topic(name="loss_gap", at=0):
    return questions.topics(name)[at]


def test_a_file_answers_by_key_or_for_all_and_says_what_is_wrong_with_it(tmp_path):
    path = tmp_path / "answers.json"
    named = {"answers": {topic().key: {"refuted": 1, "low": 0.1, "high": 0.01}}}
    path.write_text(json.dumps(named))
    legal = [one.key for one in questions.topics("loss_gap")]
    read = answers.read(path, RATES, legal)
    assert read(topic()).probabilities["refuted"] == 1.0
    assert read(topic()).interval == (0.01, 0.1)
    assert read(topic(at=-1)).probabilities == pytest.approx(RATES)


WRONG = [
    ("{", "cannot use"),
    ("[]", r"the file is \[\], and is to be \{\.\.\.\}"),
    ('{"answer": {}}', "no key 'answer' in the file; nearest: answers"),
    ('{"answers": []}', r"answers is \[\], and is to be"),
    ('{"default": 3}', "default is 3, and is to be"),
    ('{"default": {"hold": 1}}', "no key 'hold' in default; nearest: holds"),
    ('{"default": {"holds": "a"}}', 'holds of default is "a", and is to be a number'),
    ('{"default": {"holds": true}}', "holds of default is true, and is to be a number"),
    ('{"default": {"holds": 1, "low": NaN, "high": 1}}', "low of default is NaN"),
    ('{"default": {"holds": 1, "low": 1}}', "default has one of low and high"),
    ('{"default": {"holds": 2}}', "default: probabilities are from 0 to 1"),
    ('{"answers": {"loss_gap.digest_decide": {"holds": 1}}}', "nearest: loss_gap.digest_decides"),
    ('{"answers": {"a": {"holds": 1}}}', "no key 'a' in the questions"),
]


@pytest.mark.parametrize(("written", "said"), WRONG)
def test_an_answers_file_that_will_not_do_is_refused_by_what_is_wrong_in_it(
    tmp_path, written, said
):
    path = tmp_path / "answers.json"
    path.write_text(written)
    legal = [one.key for one in questions.topics("loss_gap")]
    with pytest.raises(UsageError, match=said) as refused:
        answers.read(path, RATES, legal)
    assert "object" not in str(refused.value)
    assert str(refused.value).endswith("}")


def test_an_answers_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*none.json: No such file or directory\n"):
        answers.read(tmp_path / "none.json", RATES, [])


def planned(tmp_path):
    layout = ended(tmp_path, "loss_gap", "r")
    layout.verdict.unlink()
    return layout


ANSWER = Answer(probabilities={"holds": 0.3, "refuted": 0.6, "partly": 0.1}, interval=(1e-3, 1.0))


def test_a_seal_is_of_the_answer_the_plan_and_a_secret(tmp_path):
    layout = planned(tmp_path)
    sealed = seal.seal(layout, ANSWER)
    said = json.loads(json.dumps(dataclasses.asdict(ANSWER)))
    assert seal.check(layout.root, said, sealed.nonce)
    assert not seal.check(layout.root, said | {"interval": [1e-3, 2.0]}, sealed.nonce)
    changed = said | {"probabilities": {"holds": 0.6, "refuted": 0.3, "partly": 0.1}}
    assert not seal.check(layout.root, changed, sealed.nonce)
    assert not seal.check(layout.root, said, "0" * 32)
    assert sealed.nonce not in (layout.root / seal.NAME).read_text()
    layout.plan.write_text(layout.plan.read_text().replace('"seed": 0', '"seed": 1'))
    assert not seal.check(layout.root, said, sealed.nonce)


def test_a_run_that_has_begun_is_not_predicted(tmp_path):
    layout = planned(tmp_path / "a")
    layout.stream("healthy", 0).parent.mkdir(parents=True)
    with pytest.raises(PrerequisiteError, match="records already"):
        seal.seal(layout, ANSWER)
    layout = planned(tmp_path / "b")
    seal.seal(layout, ANSWER)
    with pytest.raises(PrerequisiteError, match=r"prediction\.json already"):
        seal.seal(layout, ANSWER)
    with pytest.raises(PrerequisiteError, match=r"verdict\.json already"):
        seal.seal(ended(tmp_path / "c", "loss_gap", "r"), ANSWER)


class Engine:
    """An engine that only looks whether the prediction is there."""

    name = "looking"

    def __init__(self):
        self.seen = []

    def start(self, plan, layout, arms, batch):
        self.seen.append((layout.root / seal.NAME).exists())
        raise HarnessError("no ranks here")


def question(name="loss_gap"):
    return questions.Question(
        dimension=Dimension.RANKS,
        topic=topic(name),
        gpus=2,
        seed=1,
        params=values(name),
        drawn=(),
    )


def test_the_seal_is_there_before_any_rank_starts(tmp_path):
    engine = Engine()
    case = session._case(question(), tmp_path, "cpu")
    stoppable = Stoppable(engine, Pool(ranks=1).stop)
    found = session._carry_out(case, stoppable, choose(2, "cpu", 0), question(), ANSWER)
    assert engine.seen == [True]
    assert found.outcome == "unknown"
    assert "no ranks here" in found.reason
    assert found.sealed is not None


def scored(found, answer=ANSWER):
    return session.item(question(), answer, found, RATES, [])


def of(outcome, effect=None):
    return Found(outcome=outcome, reason="", effect=effect, run=None, sealed=None)


def test_what_a_run_leaves_open_costs_nothing_and_is_worth_nothing():
    item = scored(of("unknown", 0.5))
    assert item.skill is None
    sitting = Sitting(date="d", player="p", draw=1, items=(item, scored(of("refuted"))))
    assert len(sitting.skills(Dimension.RANKS)) == 1


def test_verdict_and_number_count_alike():
    alone = scored(of("refuted"))
    assert alone.number_skill is None
    assert alone.skill == alone.verdict_skill
    both = scored(of("refuted", 0.5))
    assert both.number_skill == score.number_skill((1e-3, 1.0), 0.5, [])
    assert both.skill == pytest.approx((both.verdict_skill + both.number_skill) / 2)
    silent = scored(of("refuted", 0.5), dataclasses.replace(ANSWER, interval=None))
    assert silent.skill == silent.verdict_skill


def test_rounding_below_its_floor_counts_as_the_floor():
    assert session._size(holds("", effect=1e-18, floor=2e-16)) == 2e-16
    assert session._size(holds("", effect=-0.5, floor=None)) == 0.5
    assert session._size(holds("", effect=math.inf)) is None
    assert session._size(holds("")) is None


def item(dimension, skill):
    return Item(dimension=dimension, key="k", outcome="holds", probabilities={}, skill=skill)


def test_history_is_a_player_s_own_and_survives_a_damaged_line(tmp_path):
    for date, player, skill in (("1", "a", 1.0), ("2", "b", -1.0), ("3", "a", 0.0)):
        items = (item("state", skill), item("many ranks", None))
        history.append(tmp_path, Sitting(date=date, player=player, draw=1, items=items))
        with (tmp_path / history.NAME).open("a") as file:
            file.write('{"torn": \n')
    found = history.read(tmp_path, "a")
    assert [sitting.date for sitting in found] == ["1", "3"]
    assert history.progress(found, Dimension.STATE) == [
        score.dimension_score([1.0]),
        score.dimension_score([1.0, 0.0]),
    ]
    assert history.progress(found, Dimension.RANKS) == [5.0, 5.0]
    assert history.read(tmp_path / "none", "a") == []


SCORES = {item.value: 2.0 + place for place, item in enumerate(Dimension)}


def test_the_picture_is_one_file_that_opens_anywhere():
    stands = dict.fromkeys(SCORES, score.FEW)
    text = radar.svg(SCORES, stands, before=dict.fromkeys(SCORES, 5.0), title="<me> & you")
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter() if element.text]
    for name, value in SCORES.items():
        assert f"{name} {value:.1f}" in words
    assert "<me> & you" in words
    assert words.count(score.FEW) == 5
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    classes = [element.get("class") for element in root.iter()]
    assert classes.count("warn") == 1
    assert classes.count("before") == 1


def test_points_of_the_chart_lie_as_far_out_as_their_scores():
    root = ElementTree.fromstring(radar.svg(SCORES, {}))
    named = {element.get("class"): element for element in root.iter() if element.get("points")}

    def radii(element):
        points = [tuple(map(float, pair.split(","))) for pair in element.get("points").split()]
        return [math.dist(point, centre) for point in points]

    centre = (float(root.find("{*}line").get("x1")), float(root.find("{*}line").get("y1")))
    full = radii(named["ring"])[0]
    assert radii(named["warn"]) == pytest.approx([0.6 * full] * 5, abs=0.2)
    assert radii(named["score"]) == pytest.approx([v / 10 * full for v in SCORES.values()], abs=0.2)


def test_the_terminal_s_chart_names_every_dimension():
    lines = radar.terminal(SCORES)
    text = "\n".join(lines)
    for name, value in SCORES.items():
        assert f"{name} {value:.1f}" in text
    assert max(map(len, lines)) <= 64
    assert text != "\n".join(radar.terminal(dict.fromkeys(SCORES, 9.0)))


class Asked(Console):
    """A console whose answers are given."""

    def __init__(self, *typed):
        super().__init__(record=True, width=100, file=io.StringIO())
        self.typed = list(typed)

    def input(self, prompt="", **more):
        self.print(prompt)
        return self.typed.pop(0)


@pytest.mark.parametrize("name", NAMES)
def test_a_question_shows_code_and_claim_and_gives_nothing_away(name):
    out = Asked("nonsense", "70 20 10", "1e-3 1", "none")
    one = dataclasses.replace(question(), topic=topic(name), params=values(name))
    given = ask(out, 1, [one], RATES, "share")
    said = out.export_text()
    assert given.probabilities["holds"] == pytest.approx(0.7)
    assert given.interval == (1e-3, 1.0)
    assert "type percentages" in said
    scenario = scenarios.load(name)
    assert " ".join(topic(name).text.split()) in " ".join(said.split())
    assert "def " in said
    for secret in (scenario.title, " ".join((scenario.run.__globals__["__doc__"] or "").split())):
        assert secret not in " ".join(said.split())


def test_an_answer_that_breaks_off_runs_nothing():
    out = Asked()
    out.input = lambda *prompt, **more: (_ for _ in ()).throw(EOFError)
    with pytest.raises(KeyboardInterrupt):
        ask(out, 1, [question()], RATES, None)


def test_without_a_terminal_nobody_is_asked(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-m", "launch.predict", f"results={tmp_path}"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert answer.returncode == 2
    assert "answers=FILE" in answer.stderr
    assert not (tmp_path / history.FOLDER).exists()


def test_somebody_who_knows_has_full_marks_and_a_history(tmp_path):
    """Answers from a file, real ranks, and the seals checked afterwards."""
    drawn = questions.draw(NAMES, random.Random(5), only=Dimension.STATE)
    known = {"answers": {q.topic.key: {q.topic.expected: 1.0} for q in drawn}}
    path = tmp_path / "answers.json"
    path.write_text(json.dumps(known))
    results = tmp_path / "results"
    words = [
        *("draw=5", "dimension=state", "player=me", "device=cpu"),
        *(f"answers={path}", f"results={results}", "--json"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "launch.predict", *words],
        cwd=ROOT,
        env=environment(**{MARK: str(results)}),
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    skills = []
    for one, asked in zip(told["items"], drawn, strict=True):
        # Fresh parameters may leave a claim open, or turn it: then nobody knew.
        right = one["outcome"] == asked.topic.expected
        assert (one["skill"] == 1.0) is right, one
        assert (one["skill"] is None) is (one["outcome"] == "unknown"), one
        skills += [one["skill"]] if one["skill"] is not None else []
    assert 1.0 in skills
    assert told["scores"]["state"] == pytest.approx(score.dimension_score(skills))
    assert told["standings"]["state"] == score.FEW
    assert "not enough items" in done.stderr

    where = Path(told["session"])
    assert (where / session.RADAR).exists()
    assert check(where) == 0
    stored = json.loads((where / session.ANSWERS).read_text())
    stored["items"][0]["answer"]["probabilities"] = {"holds": 0.2, "refuted": 0.3, "partly": 0.5}
    (where / session.ANSWERS).write_text(json.dumps(stored))
    assert check(where) == 2
    (sitting,) = history.read(results / history.FOLDER, "me")
    assert sitting.skills(Dimension.STATE) == skills
    assert_no_orphans(results)


def test_the_same_number_draws_the_same_questions(capsys):
    told = []
    for _ in range(2):
        assert main(["questions=true", "draw=11"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
    assert len(told[0]["questions"]) == 10
    assert not any("expect" in key for one in told[0]["questions"] for key in one)


def test_scores_so_far_are_over_all_sessions():
    sittings = [
        Sitting(date="1", player="a", draw=1, items=tuple(item("state", 1.0) for _ in range(3))),
        Sitting(date="2", player="a", draw=1, items=tuple(item("state", 1.0) for _ in range(4))),
    ]
    scores, stands = report.scores(sittings)
    assert scores["state"] == score.dimension_score([1.0] * 7)
    assert stands["state"] == score.ABOVE
    assert stands["many ranks"] == score.FEW
    assert report.sparkline([0.0, 10.0]) == "▁█"
