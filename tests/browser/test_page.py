"""The page in headless Chromium: with scripts and without, wide and narrow, light and dark."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from harness.report import html as report
from harness.report.wording import printable
from tests.report_runs import ENVIRONMENT, EVIL, Parsed, evil_run, toy_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not os.access(CHROMIUM, os.X_OK), reason="no headless Chromium here"),
]
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--virtual-time-budget=4000",
)

# Runs after the page's own scripts and leaves what it finds in the document.
PROBE = """
<script>
window.onerror = (message) => (document.title = `error: ${message}`);
setTimeout(async () => {
  const boxed = (e) => e.closest(".scroll, pre, .tip, .u-over") !== null;
  const wide = [...document.body.querySelectorAll("*")]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5 && !boxed(e))
    .map((e) => `${e.tagName}.${e.getAttribute("class")}`);
  const style = getComputedStyle(document.body);
  const tip = hover(), zoomed = await zoom();
  const found = {
    width: innerWidth, scroll: document.documentElement.scrollWidth, wide, tip, zoomed,
    height: document.body.getBoundingClientRect().height,
    colours: [style.backgroundColor, style.color],
    canvases: document.querySelectorAll(".uplot canvas").length,
    plots: document.querySelectorAll(".plot").length,
    drawn: [...document.querySelectorAll(".chart")].map((e) => getComputedStyle(e).opacity),
    boxes: [...document.querySelectorAll(".plot")].map((e) => e.getBoundingClientRect().height),
    fetched: performance.getEntriesByType("resource").map((e) => e.name),
    error: document.title.startsWith("error:") ? document.title : null,
    text: [...document.querySelectorAll(".chart text")].map((e) => e.getBBox().height),
  };
  const out = parent.document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  parent.document.body.append(out);
}, 1000);
function send(over, x, y, ...types) {
  const box = over.getBoundingClientRect();
  const at = { clientX: box.left + x * box.width, clientY: box.top + y * box.height,
    movementX: 9, movementY: 9, bubbles: true, button: 0, buttons: 1 };
  for (const type of types) over.dispatchEvent(new MouseEvent(type, at));
}
function hover() {
  const over = document.querySelectorAll(".u-over")[1];
  if (!over) return null;
  over.matches = () => true;
  send(over, 30 / 39, 0.2, "mouseenter", "mousemove");
  return over.querySelector(".tip").innerText;
}
const settled = () => new Promise((done) => setTimeout(done, 50));
async function zoom() {
  const over = document.querySelectorAll(".u-over")[1];
  if (!over) return null;
  const step = () => over.querySelector(".tip b").innerText;
  const ends = () => [0, 1].map((x) => (send(over, x, 0.5, "mousemove"), step()));
  const before = ends();
  send(over, 10 / 39, 0.5, "mousemove", "mousedown");
  send(over, 20 / 39, 0.5, "mousemove", "mouseup");
  await settled();
  const during = ends();
  send(over, 0.5, 0.5, "dblclick");
  await settled();
  return [before, during, ends()];
}
</script>
"""
BLOCK = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"script-src 'none'; default-src 'none'; style-src 'unsafe-inline'\">"
)


def write(run, environment=ENVIRONMENT, config="gpus: 4\n"):
    layout, scenario, tables, verdict = run
    report.write(layout, scenario, "toy", tables, verdict, environment, config)
    return layout.report.read_text(encoding="utf-8")


def open_page(tmp_path, source, *, switches=()):
    page = tmp_path / "page.html"
    page.write_text(source, encoding="utf-8")
    result = subprocess.run(
        [
            CHROMIUM,
            *SWITCHES,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,9000",
            *switches,
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return result.stdout


def probe(tmp_path, source, *, width=1280, height=8000, switches=()):
    # A window of this browser is at least 500 pixels wide; a frame may be narrower.
    inner = html.escape(source.replace("</body>", f"{PROBE}</body>"))
    frame = f'<iframe style="width:{width}px;height:{height}px;border:0" srcdoc="{inner}"></iframe>'
    dom = open_page(tmp_path, f"<!doctype html><body>{frame}</body>", switches=switches)
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)
    assert found, "the probe did not run"
    return json.loads(html.unescape(found.group(1)))


def without_scripts(source):
    return re.sub(r"<script.*?</script>", "", source, flags=re.S)


def test_with_scripts_every_chart_in_view_gets_a_live_plot(tmp_path):
    found = probe(tmp_path, write(toy_run(tmp_path / "run")))
    assert found["error"] is None
    assert found["plots"] == 2
    assert found["canvases"] == 2
    assert found["drawn"] == ["0", "0"]
    assert found["fetched"] == []


def test_only_charts_near_the_screen_are_built_at_once(tmp_path):
    found = probe(tmp_path, write(toy_run(tmp_path / "run")), height=500)
    assert found["plots"] == 2
    assert found["canvases"] < 2


def test_hovering_reads_values_at_full_precision_and_names_nan(tmp_path):
    found = probe(tmp_path, write(toy_run(tmp_path / "run")))
    lines = found["tip"].split("\n")
    assert lines[0] == "step 30"
    said = dict(zip(lines[1::2], lines[2::2], strict=True))
    assert said["clip_rank1, rank 2"] == "nan"
    assert float(said["clip_rank1, rank 0"]) == pytest.approx(
        0.7 * 2.718281828459045**-2, rel=1e-15
    )


def test_dragging_zooms_and_a_double_click_shows_all_again(tmp_path):
    before, during, after = probe(tmp_path, write(toy_run(tmp_path / "run")))["zoomed"]
    assert before == ["step 0", "step 39"]
    first, last = (int(label.removeprefix("step ")) for label in during)
    assert (first, last) == (pytest.approx(10, abs=1), pytest.approx(20, abs=1))
    assert after == before


@pytest.mark.parametrize("width", [400, 1280])
def test_scripts_shift_nothing(tmp_path, width):
    source = write(toy_run(tmp_path / "run"))
    with_ = probe(tmp_path, source, width=width)
    without = probe(tmp_path, without_scripts(source), width=width)
    assert without["canvases"] == 0
    assert with_["canvases"] == 2
    assert with_["height"] == without["height"]
    assert with_["boxes"] == without["boxes"]
    assert without["drawn"] == ["1", "1"]


@pytest.mark.parametrize("fields", ["plain", "hostile", "long"])
@pytest.mark.parametrize("scripts", [False, True])
def test_nothing_is_wider_than_a_narrow_screen(tmp_path, scripts, fields):
    if fields == "plain":
        run = toy_run(tmp_path / "run")
    else:
        run, _ = evil_run(tmp_path / "run", EVIL if fields == "hostile" else "x" * 120)
    source = write(run, {"x" * 120: "x" * 500}, "key: " + "x" * 500)
    found = probe(tmp_path, source if scripts else without_scripts(source), width=400)
    assert found["width"] == 400
    assert found["wide"] == []
    assert found["scroll"] <= 400


def test_text_in_drawings_keeps_its_size_on_a_narrow_screen(tmp_path):
    source = write(toy_run(tmp_path / "run"))
    narrow, wide = (probe(tmp_path, source, width=width)["text"] for width in (400, 1280))
    assert min(narrow) == min(wide) > 10


def test_without_scripts_everything_is_said_and_drawn(tmp_path):
    run = toy_run(tmp_path / "run")
    source = write(run)
    blocked = source.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{BLOCK}', 1)
    dom = Parsed()
    dom.feed(open_page(tmp_path, blocked))
    assert dom.tags["canvas"] == 0
    assert dom.tags["path"] >= 8
    said = " ".join(dom.text.split())
    _, scenario, _, verdict = run
    for claim in scenario.claims:
        finding = verdict.findings[claim.name]
        for part in (claim.text, finding.reason, finding.outcome.value):
            assert part in said
    for number in ("0.032", "9.1e-8", "3.52e5", "0.149979", "10 of 40"):
        assert number in said


def test_dark_is_dark_and_light_is_light(tmp_path):
    source = write(toy_run(tmp_path / "run"))

    def brightness(switch):
        found = probe(
            tmp_path, source, switches=(f"--blink-settings=preferredColorScheme={switch}",)
        )
        return [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in found["colours"]]

    dark_paper, dark_ink = brightness(0)
    light_paper, light_ink = brightness(1)
    assert dark_paper < 40 < 200 < dark_ink
    assert light_ink < 60 < 240 < light_paper


def test_hostile_texts_run_nothing_and_are_read_as_they_stand(tmp_path):
    run, fields = evil_run(tmp_path / "run")
    source = write(run, {EVIL: EVIL}, EVIL)
    found = probe(tmp_path, source)
    assert found["error"] is None
    assert found["canvases"] == found["plots"] > 0
    dom = Parsed()
    dom.feed(open_page(tmp_path, source))
    assert dom.tags["img"] == 0
    said = "".join(dom.text.split())
    assert [field for field in fields if "".join(printable(field).split()) not in said] == []
