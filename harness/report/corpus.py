"""The page of a corpus: every scenario with its findings, filtered in the browser, offline.

Without scripts all of it is shown and nothing is lost but the filters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from harness.plan import write_text
from harness.plural import number_of
from harness.report.markup import cut, text
from harness.report.wording import DASH, against

_ASSETS = Path(__file__).parent / "assets"
_SIGNS = {"holds": "✓", "refuted": "✕", "unknown": "?"}
_STATES = {
    "as_expected": "as expected",
    "unexpected": "not as expected",
    "inconclusive": "inconclusive",
    "failed": "failed",
    "skipped": "skipped",
    "interrupted": "interrupted",
    "not_run": "not run",
}
_WEIGHTS = {True: "part", False: "agree", None: "not recorded"}
Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page is made from."""

    id: str
    environment: Mapping[str, Any]
    seconds: float
    entries: Sequence[Entry]
    """Entries of corpus.json, each with `report`: where its page is, seen from the corpus's folder,
    or None."""
    claims: Mapping[str, Mapping[str, str]]
    """Scenario -> claim -> the claim in one sentence."""


def write(path: Path, page: Page) -> None:
    """Write the page.

    Raises:
        RecordError: if the file cannot be written.
    """
    write_text(path, render(page))


def render(page: Page) -> str:
    """Return the page."""
    order = sorted(page.entries, key=lambda e: (e["family"], e["scenario"], e["gpus"]))
    groups = [list(group) for _, group in groupby(order, key=lambda entry: entry["scenario"])]
    sizes = sorted({entry["gpus"] for entry in order})
    style = "\n".join(_asset(name) for name in ("page.css", "corpus.css"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(f'corpus {page.id}: {_tally(order)}')}</title>\n"
        f"<style>\n{style}\n</style>\n</head>\n<body>\n"
        f"{_head(page, order, sizes)}\n{_filters(order)}\n{_table(page, groups, sizes)}\n"
        f"<script>\n{_asset('corpus.js')}\n</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8").rstrip()


def _tally(entries: Sequence[Entry]) -> str:
    counts = Counter(entry["state"] for entry in entries)
    return ", ".join(f"{counts[state]} {said}" for state, said in _STATES.items() if counts[state])


def _head(page: Page, entries: Sequence[Entry], sizes: Sequence[int]) -> str:
    count = len({entry["scenario"] for entry in entries})
    facts = page.environment
    packages = facts.get("packages") or {}
    source = facts.get("source") or {}
    commit = f"commit {str(source.get('commit'))[:10]}" if source.get("commit") else ""
    backends = sorted({f"{e['backend']} on {e['device']}" for e in entries if e["backend"]})
    shown = [
        f"torch {packages.get('torch')}" if packages.get("torch") else "",
        f"Python {facts.get('python')}" if facts.get("python") else "",
        ", ".join(backends),
        f"{facts.get('cpus')} cores" if facts.get("cpus") else "",
        commit + (", with changes" if source.get("dirty") else "") if commit else "",
        str(facts.get("started") or ""),
        f"{page.seconds:.0f} s",
    ]
    spans = "".join(f"<span>{text(fact)}</span>" for fact in shown if fact)
    ranks = ", ".join([*map(str, sizes[:-1]), number_of(sizes[-1], "rank")])
    runs = f"{number_of(len(entries), 'run')}, " if len(sizes) > 1 else ""
    return (
        f'<header><p class="crumb"><b>crossrank</b> corpus / <code>{text(page.id)}</code></p>'
        f"<h1>{number_of(count, 'scenario')} on {ranks}: {runs}{text(_tally(entries))}</h1>"
        f'<p class="facts">{spans}</p><nav aria-label="Files"><a href="corpus.json">corpus.json</a>'
        '<a href="junit.xml">junit.xml</a></nav></header>'
    )


def _filters(entries: Sequence[Entry]) -> str:
    outcomes = [o for o in _SIGNS if any(o in _outcomes(entry) for entry in entries)]
    states = [state for state in _STATES if any(entry["state"] == state for entry in entries)]
    weights = dict.fromkeys(_weights(entry) for entry in entries)
    selects = [
        ("family", "Family", sorted({e["family"] for e in entries if e["family"]}), {}),
        ("cause", "Cause", sorted({e["cause"] for e in entries if e["cause"]}), {}),
        ("finding", "A finding", [*outcomes, "off"], {"off": "not as expected"}),
        ("result", "Result", states, _STATES),
        ("weights", "Weights of the ranks", sorted(weights), {}),
    ]
    fields = "".join(_select(*select) for select in selects)
    return (
        '<form class="filters" id="filters" hidden aria-label="Filters">'
        '<label>Text<input type="search" name="text" autocomplete="off" spellcheck="false">'
        f"</label>{fields}"
        '<button type="reset">All</button><output id="shown" aria-live="polite"></output></form>'
    )


def _select(name: str, label: str, values: Sequence[str], said: Mapping[str, str]) -> str:
    options = "".join(
        f'<option value="{text(value)}">{text(said.get(value, value))}</option>' for value in values
    )
    return (
        f'<label>{label}<select name="{name}"><option value="">any</option>{options}</select>'
        "</label>"
    )


def _outcomes(entry: Entry) -> set[str]:
    found = {finding["outcome"] for finding in entry["findings"]}
    off = any(finding["outcome"] != finding["expects"] for finding in entry["findings"])
    return found | ({"off"} if off else set())


def _weights(entry: Entry) -> str:
    return _WEIGHTS[entry["ranks_differ"]]


def _table(page: Page, groups: Sequence[Sequence[Entry]], sizes: Sequence[int]) -> str:
    heads = "".join(f'<th scope="col">{size} ranks</th>' for size in sizes)
    bodies = "".join(_scenario(page, group, sizes) for group in groups)
    return (
        '<section aria-label="Scenarios"><div class="scroll" tabindex="0">'
        '<table class="corpus" id="corpus"><thead><tr>'
        '<th scope="col">Scenario</th><th scope="col">Family, cause</th>'
        f'<th scope="col">Weights</th>{heads}</tr></thead>{bodies}</table></div>'
        '<p class="note" id="none" hidden>No scenario fits these filters.</p>'
        '<p class="note">Weights: whether the ranks of a faulty arm hold other weights, by their '
        "digests. Many faults leave every rank with the same wrong weights.</p></section>"
    )


def _scenario(page: Page, group: Sequence[Entry], sizes: Sequence[int]) -> str:
    first = group[0]
    name = first["scenario"]
    by = {entry["gpus"]: entry for entry in group}
    claims = page.claims.get(name, {})
    words = " ".join([name, first["title"], first["cause"], *claims, *claims.values()])
    marks = {
        "family": first["family"],
        "cause": first["cause"],
        "finding": " ".join(sorted(set().union(*map(_outcomes, group)))),
        "result": " ".join(sorted({entry["state"] for entry in group})),
        "weights": "|".join(sorted(set(map(_weights, group)))),
        "text": words.lower(),
    }
    data = "".join(f' data-{key}="{text(value)}"' for key, value in marks.items())
    known = [entry["ranks_differ"] for entry in group if entry["ranks_differ"] is not None]
    weights = _WEIGHTS[any(known)] if known else DASH
    cells = "".join(
        f'<td class="run" data-l="{size} ranks">{_cell(by.get(size))}</td>' for size in sizes
    )
    return (
        f'<tbody{data}><tr class="scenario"><th scope="row"><p class="claim">{text(name)}</p>'
        f'<p class="reason">{text(first["title"])}</p></th>'
        f'<td data-l="Family, cause">{text(first["family"] or DASH)}'
        f"<small><code>{text(first['cause'])}</code></small></td>"
        f'<td data-l="Weights">{weights}</td>{cells}</tr>{_claims(claims, group, sizes)}</tbody>'
    )


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return DASH
    counts = Counter(finding["outcome"] for finding in entry["findings"])
    tally = " ".join(
        f'<span class="key {outcome}" title="{outcome}">{sign}</span>{counts[outcome]}'
        for outcome, sign in _SIGNS.items()
        if counts[outcome]
    )
    state = f'<span class="state {entry["state"]}">{_STATES[entry["state"]]}</span>'
    if entry["report"]:
        state = f'<a href="{quote(entry["report"])}">{state}</a>'
    took = f"<small>{entry['seconds']:.1f} s</small>" if entry["seconds"] is not None else ""
    problem = entry["problem"]
    why = f'<p class="problem">{text(cut(problem, 400))}</p>' if problem else ""
    return f'{state}<p class="tally">{tally}</p>{took}{why}'


def _claims(claims: Mapping[str, str], group: Sequence[Entry], sizes: Sequence[int]) -> str:
    names = dict.fromkeys(f["claim"] for entry in group for f in entry["findings"])
    if not names:
        return ""
    by = {(e["gpus"], f["claim"]): f for e in group for f in e["findings"]}
    rows = []
    for name in names:
        cells = "".join(f"<td>{_finding(by.get((size, name)))}</td>" for size in sizes)
        reason = next(f["reason"] for (_, claim), f in by.items() if claim == name)
        rows.append(
            f"<tr><td><p>{text(claims.get(name, name))}</p>"
            f'<small class="why">{text(cut(reason, 300))}</small></td>{cells}</tr>'
        )
    heads = "".join(f"<th>{size} ranks</th>" for size in sizes)
    return (
        f'<tr><td class="more" colspan="{3 + len(sizes)}"><details><summary>{len(names)} claims'
        "</summary><table><thead><tr><th>Claim, and why "
        f"({sizes[0]} ranks)</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        "</details></td></tr>"
    )


def _finding(finding: Mapping[str, Any] | None) -> str:
    if finding is None:
        return DASH
    outcome = finding["outcome"]
    off = outcome != finding["expects"]
    size = ""
    if finding["effect"] is not None:
        size = f"<small>{text(against(finding))}</small>"
    expected = f"<small>expected {finding['expects']}</small>" if off else ""
    sign = _SIGNS.get(outcome, "")
    return (
        f'<span class="outcome {outcome}{" off" if off else ""}">'
        f'<span aria-hidden="true">{sign}</span> {outcome}</span>{size}{expected}'
    )
