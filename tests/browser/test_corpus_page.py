"""The index of a corpus in headless Chromium: what its filters leave, and how it looks without."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from harness.report import corpus
from tests.browser.test_page import CHROMIUM, SWITCHES

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason="no headless Chromium here"),
]


def finding(claim, outcome, expects="holds"):
    return {
        "claim": claim,
        "kind": "symptom",
        "expects": expects,
        "outcome": outcome,
        "effect": 0.5,
        "floor": 1e-16,
        "multiple": 5e15,
        "unit": "u",
        "reason": f"<b>why</b> {claim}",
    }


def entry(name, family, *findings, gpus=2, differ=None, state="as_expected"):
    return {
        "scenario": name,
        "gpus": gpus,
        "title": f"{name} & <title>",
        "family": family,
        "cause": f"cause_{name}",
        "device": "cpu",
        "backend": "gloo",
        "state": state,
        "seconds": 1.0,
        "run": None,
        "report": None,
        "problem": None,
        "headline": "",
        "ranks_differ": differ,
        "findings": list(findings),
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    entries = [
        entry("alpha", "one", finding("a", "holds"), differ=True),
        entry("beta", "two words", finding("b", "refuted", "refuted"), differ=False),
        entry("gamma", "one", finding("c", "refuted"), state="unexpected"),
        entry("gamma", "one", finding("c", "unknown"), gpus=4, state="inconclusive"),
        entry("delta", "two words", state="skipped"),
    ]
    told = corpus.Page(
        id="x",
        environment={"packages": {"torch": "2.13.0"}},
        seconds=4.0,
        entries=entries,
        claims={"alpha": {"a": "A sentence on peaches."}},
    )
    path = tmp_path_factory.mktemp("corpus") / "index.html"
    corpus.write(path, told)
    return path


FILTERS = {
    "": ["alpha", "beta", "delta", "gamma"],
    "family=two+words": ["beta", "delta"],
    "cause=cause_alpha": ["alpha"],
    "finding=refuted": ["beta", "gamma"],
    "finding=off": ["gamma"],
    "finding=refuted&family=one": ["gamma"],
    "result=inconclusive": ["gamma"],
    "weights=part": ["alpha"],
    "weights=not+recorded": ["delta", "gamma"],
    "text=PEACHES": ["alpha"],
    "text=peaches+nonsense": [],
}
"""What is typed into the address -> the scenarios that are left."""

PROBE = """
<script>
(async () => {
  const found = {};
  // What a run has come to is in sight, also where nobody scrolls to the side.
  found.hidden = [...document.querySelectorAll("#corpus .state")]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5)
    .map((e) => e.textContent);
  found.states = document.querySelectorAll("#corpus .state").length;
  for (const filter of FILTERS) {
    location.hash = filter || "none=";
    await new Promise((done) => setTimeout(done, 40));
    const all = [...document.querySelectorAll("#corpus > tbody")];
    const left = all.filter((e) => e.offsetHeight > 0);
    found[filter] = left.map((e) => e.querySelector(".claim").textContent).sort();
    found[`count ${filter}`] = document.getElementById("shown").textContent;
  }
  const wide = [...document.querySelectorAll("body *")]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5)
    .filter((e) => !e.closest(".scroll, pre"));
  found.wide = wide.map((e) => e.tagName);
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
</script>
"""


def test_filters_leave_what_fits(page):
    probe = PROBE.replace("FILTERS", json.dumps(list(FILTERS)))
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("</body>", f"{probe}</body>"))
    answer = subprocess.run(
        [CHROMIUM, *SWITCHES, "--window-size=500,900", "--dump-dom", f"file://{probed}"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    told = re.search(r'<pre id="probe">(.*?)</pre>', answer.stdout, re.S)
    assert told, answer.stdout[-2000:] + answer.stderr[-2000:]
    found = json.loads(unescape(told[1]))
    for typed, left in FILTERS.items():
        assert found[typed] == left, typed
        assert found[f"count {typed}"] == f"{len(left)} of 4 scenarios"
    assert found["wide"] == []
    assert (found["states"], found["hidden"]) == (5, [])


def test_without_scripts_everything_is_shown_but_the_filters(page):
    text = page.read_text()
    assert not re.search(r"<tbody[^>]*\shidden", text)
    assert re.search(r'<form [^>]*id="filters" hidden', text)


def test_texts_from_outside_are_no_markup(page):
    text = page.read_text()
    assert "<title>" not in text.replace("<title>corpus", "")
    assert "<b>why</b>" not in text
    assert "alpha & <title>" in unescape(text)
