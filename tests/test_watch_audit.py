"""The replay audit in real ranks: right recipes are equal, wrong ones are named, with numbers."""

from __future__ import annotations

import json

import pytest

from tests.watching import rank_files, torchrun

COMMON = {"steps": 2, "seed": 0, "accumulate": 1, "ragged": False, "autocast": False, "every": 1}
TWO, RAGGED, HALF = {"accumulate": 2}, {"ragged": True}, {"autocast": True}
EQUAL = {
    "plain": {},
    "plain-autocast": HALF,
    "global_tokens": RAGGED,
    "global_tokens-autocast": RAGGED | HALF,
    "unequal_weighted": {},
    "accumulation": TWO,
    "accumulation_global": TWO | RAGGED,
    "by_hand": {},
    "clipped": {},
    "grad_scaler": {},
    "dropout": {},
    "batch_norm": {},
    "checkpoint": {},
    "compressed": {},
    "focal": {},
}
"""Recipes for the gradient of one process: exactly once that."""
OWN = {
    "two_losses": (1.0, 0.3),
    "returns_hidden": (1.0, 0.1),
    "half_squared": (0.5,),
    "sum": (24.0,),
}
"""Recipes whose factors are the script's own business: losses, each with its factor."""
WRONG = {
    "plain-ragged": ("valid_count_mean", RAGGED),
    "plain-ragged_autocast": ("valid_count_mean", RAGGED | HALF),
    "masked": ("valid_count_mean", RAGGED),
    "masked_by_hand": ("valid_count_mean", RAGGED),
    "loss_inside": ("valid_count_mean", RAGGED),
    "unequal": ("unequal_batches_equal_weight", {}),
    "accumulation-ragged": ("accumulation_normalisation", TWO | RAGGED),
    "accumulation_undivided": ("accumulation_factor", TWO),
    "scaled": ("loss_scaled_by_world", {}),
    "divided": ("loss_divided_by_world", {}),
    "divided_again": ("averaged_twice", {}),
    "by_hand_summed": ("gradients_summed", {}),
}
COULD_NOT = {
    "penalty": "past the outputs",
    "gradient_penalty": "past the outputs",
    "forward_communicates": "communicates with the other ranks",
    "depends_on_the_past": "gives another output",
    "not_cleared": "were not cleared",
}
UNKNOWN = {
    "own_loss": "not one whose rows could be counted",
    "weighted_rows": "each row of a loss a weight of its own",
}
OTHERWISE = "one_rank_weighs_more"
LATER = ("one_layer_scaled", "wrong_layer")
RANKS = 3


def cases():
    options = EQUAL | {name: {} for name in [*OWN, *COULD_NOT, *UNKNOWN, *LATER, OTHERWISE]}
    options |= {name: about for name, (_, about) in WRONG.items()}
    return {
        name: COMMON | {"case": name.partition("-")[0]} | about for name, about in options.items()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("audits")
    (out / "cases.json").write_text(json.dumps(cases()))
    ended = torchrun("-m", "tests.watched.audit_driver", out, out / "cases.json", ranks=RANKS)
    assert ended.returncode == 0, ended.stderr
    return out


def audits(out, name):
    """Return the audits of a case; the last one comes first, as nothing is special about it."""
    for rank in rank_files(out, RANKS, f"{name}."):
        assert rank["failed"] is None
        assert not [note for note in rank["notes"] if "no longer observed" in note]
    events = []
    for path in (out / name).glob("attempt0-*/rank*.journal.jsonl"):
        events += [json.loads(line) for line in path.read_text().splitlines()]
    found = [event for event in events if event["kind"] == "audit"]
    # Without a wrapper a module is known from its first update on.
    first = 1 if name.startswith("by_hand") else 0
    assert sorted(event["update"] for event in found) == list(range(first, 2))
    assert len([event for event in events if event["kind"] == "audit cost"]) == RANKS * len(found)
    return sorted(found, key=lambda event: -event["update"])


def answer(out, name):
    return json.loads((out / f"{name}.answer.json").read_text())


def alarms(out, name):
    return [d for d in answer(out, name)["diagnoses"] if d["strength"] != "fact"]


@pytest.mark.parametrize("name", EQUAL)
def test_a_right_recipe_is_one_process_up_to_rounding(runs, name):
    for event in audits(runs, name):
        assert event["could_not"] is None
        assert event["factor"] == pytest.approx(1.0, abs=1e-3 if name == "compressed" else 1e-5)
        assert event["synchronised"]["clean"]
        assert event["one_process"]["clean"]
        assert event["synchronised"]["compared"] >= 3
        assert event["replays"] >= 2
    assert answer(runs, name)["exit_code"] == 0


@pytest.mark.parametrize("name", OWN)
def test_a_factor_of_the_scripts_own_is_no_fault(runs, name):
    for event in audits(runs, name):
        assert [loss["factor"] for loss in event["losses"]] == pytest.approx(OWN[name], rel=1e-4)
        assert event["synchronised"]["clean"]
    assert answer(runs, name)["exit_code"] == 0


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_recipe_is_named(runs, name):
    cause, _ = WRONG[name]
    assert audits(runs, name)[0]["synchronised"]["clean"], "what the ranks ask for is averaged"
    assert [one["cause"] for one in alarms(runs, name)] == [cause]
    assert answer(runs, name)["exit_code"] == 20
    (one,) = alarms(runs, name)
    likely = ("averaged_twice", "accumulation_factor")
    assert one["strength"] == ("likely" if cause in likely else "proven")
    assert any("audits)" in sentence for sentence in one["because"])
    assert "audited.py:" in one["where"]


@pytest.mark.parametrize(
    ("name", "factor"), [("scaled", 3.0), ("divided", 1 / 3), ("accumulation_undivided", 2.0)]
)
def test_a_factor_is_exact(runs, name, factor):
    for event in audits(runs, name):
        assert event["factor"] == pytest.approx(factor, rel=1e-6)
        assert event["one_process"]["clean"], "but for the factor it is that of one process"


def test_it_is_told_where_a_factor_comes_in(runs):
    summed, again = audits(runs, "by_hand_summed")[0], audits(runs, "divided_again")[0]
    assert summed["synchronised"]["factor"] == pytest.approx(3.0, rel=1e-6)
    assert summed["later"]["factor"] == 1.0
    assert again["synchronised"]["factor"] == pytest.approx(1.0, rel=1e-6)
    assert again["later"]["factor"] == pytest.approx(1 / 3, rel=1e-6)


def test_weights_follow_from_the_counts(runs):
    """Ranks 0, 1 and 2 hold rows with 1, 1, 2, 2 ... 6, 6 labels that count."""
    for event in audits(runs, "plain-ragged"):
        (loss,) = event["losses"]
        assert loss["counts"] == {"0": [6.0], "1": [14.0], "2": [22.0]}
        due = {"0": [42 / 3 / 6], "1": [42 / 3 / 14], "2": [42 / 3 / 22]}
        for rank, weights in due.items():
            assert loss["weights"][rank] == pytest.approx(weights, rel=1e-5)
        assert event["one_process"]["fault"]
        assert event["one_process"]["residual"] > 1e5


def test_micro_batches_are_told_from_ranks(runs):
    (loss,) = audits(runs, "accumulation-ragged")[0]["losses"]
    assert loss["weighting"] == "micro-batches"
    assert loss["counts"] == {str(rank): [24.0, 16.0] for rank in range(3)}


def test_ranks_that_weigh_unequally_for_no_known_reason_are_no_alarm(runs):
    for event in audits(runs, OTHERWISE):
        (loss,) = event["losses"]
        assert loss["weighting"] == "other"
        assert loss["weights"]["0"][0] / loss["weights"]["1"][0] == pytest.approx(1.5, rel=1e-5)
    assert answer(runs, OTHERWISE)["exit_code"] == 0


@pytest.mark.parametrize("name", LATER)
def test_what_a_script_does_to_gradients_after_backward_is_seen_and_alarms_nobody(runs, name):
    for event in audits(runs, name):
        assert event["synchronised"]["clean"]
        assert event["later"]["fault"]
        assert event["later"]["tensors"][0][0] == "head.weight"
    assert answer(runs, name)["exit_code"] == 0


@pytest.mark.parametrize("name", COULD_NOT)
def test_what_cannot_be_audited_is_said_and_alarms_nobody(runs, name):
    event = audits(runs, name)[0]
    assert COULD_NOT[name] in event["could_not"]
    given = answer(runs, name)
    assert given["exit_code"] == 0
    assert any(
        "could not be audited" in line and COULD_NOT[name] in line for line in given["lines"]
    )


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_loss_that_cannot_be_counted_is_still_replayed(runs, name):
    event = audits(runs, name)[0]
    assert event["synchronised"]["clean"]
    assert UNKNOWN[name] in event["weighting_unknown"]
    assert event["factor"] is None
    assert answer(runs, name)["exit_code"] == 0


def test_the_answer_says_what_was_audited_and_what_it_cost(runs):
    lines = "\n".join(answer(runs, "plain")["lines"])
    assert "replay audit: updates 0, 1; the synchronised gradient is" in lines
    assert "it is 1 times that of one process" in lines
    assert "2 audits took" in lines


@pytest.mark.parametrize("name", ["plain", "plain-ragged", "accumulation", "checkpoint"])
def test_one_forward_pass_over_all_rows_gives_the_same(runs, name):
    for event in audits(runs, name):
        assert event["at_once"]["clean"]
        assert event["at_once"]["factor"] == pytest.approx(1.0, abs=1e-5)


def test_rows_that_have_an_influence_on_each_other_are_a_fact(runs):
    for event in audits(runs, "batch_norm"):
        assert event["at_once"]["fault"]
    given = answer(runs, "batch_norm")
    assert given["exit_code"] == 0
    assert any("influence on each other, as in batch norm" in line for line in given["lines"])
    assert "random numbers" in audits(runs, "dropout")[0]["at_once_unknown"]


def test_contributions_are_removed(runs):
    assert not list(runs.rglob("audit.optimizer*"))
