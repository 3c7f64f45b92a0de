"""The answer as a page, JSON and JUnit XML: whatever a program's texts hold."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

from harness.causes import Diagnosis, Strength
from harness.watch.answers.answer import Answer
from harness.watch.answers.damage import Damage
from harness.watch.answers.junit import junit
from harness.watch.answers.outputs import Outputs
from harness.watch.answers.page import page
from harness.watch.answers.per_rank import RankTable
from harness.watch.divergence import Difference, Divergence
from harness.watch.exit_codes import FAULT_FOUND, NOT_OBSERVED, NOTHING_FOUND

NASTY = "</title><script>alert(1)</script> & \x1b[31m \x00 \udc80 “name”"


def answer(**more) -> Answer:
    found = Divergence(
        step=2,
        phase="parameters",
        differences=(
            Difference(name=NASTY, kind="parameter", groups=((0, 2), (1,))),
            Difference(name="head.bias", kind="parameter", groups=((0, 2), (1,))),
        ),
        compared=4,
        ranks=(0, 1, 2),
    )
    diagnosis = Diagnosis(
        strength=Strength.LIKELY,
        because=(NASTY,),
        where=f"{NASTY}:3",
        ranks=(1,),
        cause="out_of_band_write",
    )
    damage = Damage(
        steps=(1, 2, 3),
        tensors={NASTY: ("", "p", "gp"), "head.bias": ("", "", "?")},
        ranks={0: ("", "", ""), 1: ("", "odd", "odd"), 2: ("", "", "?")},
    )
    table = RankTable(titles=("", "rank"), rows=(("->", NASTY),))
    fields = {
        "exit_code": FAULT_FOUND, "first": "", "divergence": found, "source": NASTY,
        "diagnoses": (diagnosis,), "notes": (NASTY,), "kept": "/kept", "table": table,
        "damage": damage, "calls": table,
    }  # fmt: skip
    return Answer(**(fields | more))


def test_what_a_program_names_things_cannot_break_the_page():
    text = page(answer())
    assert "<script" not in text
    assert "alert(1)" in text
    assert "&lt;/title&gt;" in text
    assert not re.search(r"""(src|href)\s*=\s*["']?(http|//)""", text)
    assert "\x00" not in text
    text.encode("utf-8")


def test_the_page_draws_each_tensor_and_rank_in_each_update():
    text = page(answer(divergence=None))
    for place in ("head.bias, update 3: not known", "rank 1, update 2: differs"):
        assert place in text
    assert text.count("gradient and parameter differ</title>") == 1


def test_junit_is_xml_and_says_what_kind_it_is():
    (case,) = ElementTree.fromstring(junit(answer()))
    (failure,) = case
    assert (failure.tag, failure.get("type")) == ("failure", "out_of_band_write")
    assert failure.get("message", "").startswith("step 2: rank 1 differs from the others")
    unseen = ElementTree.fromstring(
        junit(Answer(exit_code=NOT_OBSERVED, first="could not observe: nothing"))
    )
    assert (unseen.get("errors"), unseen.get("failures")) == ("1", "0")
    fine = ElementTree.fromstring(junit(Answer(exit_code=NOTHING_FOUND, first="no divergence")))
    assert (fine.get("errors"), fine.get("failures")) == ("0", "0")
    assert fine[0][0].tag == "system-out"


def test_all_outputs_are_written_and_a_place_that_cannot_be_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    outputs = Outputs(
        json=str(tmp_path / "new" / "answer.json"),
        junit=str(tmp_path / "answer.xml"),
        html=str(tmp_path / "file" / "below" / "answer.html"),
    )
    (failed,) = outputs.write(answer())
    assert "answer.html" in failed
    content = json.loads((tmp_path / "new" / "answer.json").read_text())
    assert content["exit_code"] == 20
    assert content["divergence"]["step"] == 2
    assert content["diagnoses"][0]["cause"] == "out_of_band_write"
    assert content["diagnoses"][0]["strength"] == "likely"
    assert content["damage"]["tensors"]["head.bias"] == ["", "", "?"]
    ElementTree.parse(tmp_path / "answer.xml")


def test_the_first_line_says_likely_where_it_is_no_more():
    assert "; likely cause: out_of_band_write" in answer().headline
    beside = Diagnosis(
        strength=Strength.PROVEN, because=("x",), explains=False, cause="set_epoch_missing"
    )
    assert answer(diagnoses=(beside,)).headline.endswith("cause not known")
    alone = answer(divergence=None, diagnoses=(beside,))
    assert alone.headline.startswith("x; cause: set_epoch_missing")
