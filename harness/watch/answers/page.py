"""Writes `watch.html`: the answer as one page that opens offline and needs no scripts."""

from __future__ import annotations

from pathlib import Path

import harness.report
from harness.causes import Cause, Diagnosis, Strength, catalogue
from harness.report.markup import section, table, text
from harness.watch.answers.answer import Answer, evidence
from harness.watch.answers.damage import Damage
from harness.watch.exit_codes import FAULT_FOUND, NOT_OBSERVED, NOTHING_FOUND, STOPPED
from harness.watch.naming import ranks

_BADGES = {
    NOTHING_FOUND: ("as_expected", "nothing found"),
    FAULT_FOUND: ("unexpected", "fault found"),
    STOPPED: ("unexpected", "stopped"),
    NOT_OBSERVED: ("inconclusive", "not observed"),
}
_TITLES = {
    Strength.PROVEN: "Cause",
    Strength.LIKELY: "Likely cause",
    Strength.FACT: "Worth knowing",
}
_CELL, _GAP, _LABEL = 18, 2, 9
"""Pixels of a cell and between cells; pixels of a character of a label, at most."""
_MOST_TENSORS = 120
_CLASSES = {"": "same", "g": "gradient", "p": "parameter", "gp": "both", "?": "unknown"}
_WORDS = {
    "": "equal",
    "g": "gradient differs",
    "p": "parameter differs",
    "gp": "gradient and parameter differ",
    "?": "not known",
    "odd": "differs",
}
_STYLE = """
.heat .same { fill: var(--c2); opacity: .22 } .heat .gradient { fill: var(--c5) }
.heat .parameter, .heat .odd { fill: var(--c1) } .heat .both { fill: var(--key) }
.heat .unknown { fill: none; stroke: var(--rule) }
.heat text { font: 12px var(--mono); fill: var(--ink) } .heat .at { fill: var(--soft) }
.heat .bad { stroke: var(--ink); stroke-width: 1.5; fill: none }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; color: var(--soft);
  font-size: .875rem; margin-top: .5rem }
.key svg { width: 14px; height: 14px; vertical-align: -2px; margin-right: .35em }
pre { overflow-x: auto; max-width: 100% }
pre.fix { background: var(--raised); padding: .8rem 1rem; overflow-x: auto; margin: .6rem 0 }
.because { margin: .5rem 0; padding-left: 1.2rem }
h1 { overflow-wrap: anywhere }
"""


def page(answer: Answer) -> str:
    """Return the page."""
    look, word = _BADGES.get(answer.exit_code, ("inconclusive", str(answer.exit_code)))
    head, *rest = answer.headline.split("; ", 1)
    body = [
        '<header><p class="crumb"><b>crossrank</b>harness.watch</p>',
        f'<h1 class="long">{text(head)}</h1>',
        *(f'<p class="title">{text(part)}</p>' for part in rest),
        f'<p class="conclusion"><span class="badge {look}">{word}</span>'
        f'<span class="note">exit code {answer.exit_code}</span></p></header>',
        *(_diagnosis(number, one) for number, one in enumerate(answer.diagnoses)),
    ]
    if answer.divergence is not None:
        lines = evidence(answer.divergence, source=answer.source)
        body.append(section("where", "Where it begins", f"<pre>{text(chr(10).join(lines))}</pre>"))
    if answer.table is not None:
        rows = [[text(cell) for cell in row] for row in answer.table.rows]
        body.append(
            section(
                "ranks",
                "What each rank did",
                '<p class="lead">The update before, the bad one (marked), and the one after.</p>'
                + table(answer.table.titles, rows, numeric=1),
            )
        )
    if answer.damage is not None:
        body += _damage(answer.damage, answer.divergence.step if answer.divergence else 0)
    if answer.calls is not None:
        body.append(
            section(
                "calls",
                "The last collectives of each rank",
                '<p class="lead">The first call that has no partner is marked.</p>'
                + table(answer.calls.titles, [[text(c) for c in r] for r in answer.calls.rows]),
            )
        )
    if answer.notes:
        items = "".join(f"<li>{text(note)}</li>" for note in answer.notes)
        body.append(section("notes", "Notes", f"<ul>{items}</ul>"))
    css = (Path(harness.report.__file__).parent / "assets" / "page.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(answer.headline)}</title>\n<style>\n{css}\n{_STYLE}</style>\n</head>\n"
        f"<body>\n{chr(10).join(body)}\n</body>\n</html>\n"
    )


def _diagnosis(number: int, diagnosis: Diagnosis) -> str:
    cause: Cause = catalogue()[diagnosis.cause]
    where = f" at <code>{text(diagnosis.where)}</code>" if diagnosis.where else ""
    who = f", {ranks(diagnosis.ranks)}" if diagnosis.ranks else ""
    because = "".join(f"<li>{text(sentence)}</li>" for sentence in diagnosis.because)
    parts = [f'<ul class="because">{because}</ul>']
    if diagnosis.strength > Strength.FACT:
        parts += [
            f"<p>{text(cause.why)}</p>",
            f'<pre class="fix">{text(cause.fix)}</pre>',
            f'<p class="note">To be sure: {text(cause.confirm)}</p>',
        ]
        if cause.reported:
            parts.append(f'<p class="note">Reported: {text(", ".join(cause.reported))}</p>')
    title = f"{_TITLES[diagnosis.strength]}: {text(diagnosis.cause)}{text(who)}{where}"
    return section(f"cause{number}", title, "".join(parts))


def _damage(damage: Damage, bad: int) -> list[str]:
    rows = {f"rank {rank}": marks for rank, marks in damage.ranks.items()}
    hurt = [n for n, marks in damage.tensors.items() if set("".join(marks)) & set("gp")]
    sound = [n for n in damage.tensors if n not in hurt]
    kept = set(hurt[:_MOST_TENSORS] + sound[: max(0, _MOST_TENSORS - len(hurt))])
    tensors = {name: marks for name, marks in damage.tensors.items() if name in kept}
    hidden = len(damage.tensors) - len(tensors)
    more = f'<p class="note">{hidden} more tensors are not drawn.</p>' if hidden else ""
    key = "".join(
        f'<span><svg class="heat"><rect class="{_CLASSES[mark]}" width="14" height="14"/></svg>'
        f"{_WORDS[mark]}</span>"
        for mark in ("", "g", "p", "gp", "?")
    )
    return [
        section(
            "timeline",
            "Ranks over updates",
            '<p class="lead">A filled cell: the rank is outside of the majority after that '
            "update, or there is no majority.</p>" + _grid(rows, damage.steps, bad),
        ),
        section(
            "tensors",
            "Tensors over updates",
            _grid(tensors, damage.steps, bad) + f'<p class="key">{key}</p>{more}',
        ),
    ]


def _grid(rows: dict[str, tuple[str, ...]], steps: tuple[int, ...], bad: int) -> str:
    left = _LABEL * max(map(len, rows)) + 8
    pitch = _CELL + _GAP
    width, height = left + pitch * len(steps) + 40, pitch * (len(rows) + 1) + 4
    every = 1 if steps[-1] < 100 else 5
    parts = [
        f'<text class="at" x="{left + pitch * i + _CELL / 2}" y="12" text-anchor="middle">'
        f"{step}</text>"
        for i, step in enumerate(steps)
        if step % every == 0 or step == bad
    ]
    for line, (name, marks) in enumerate(rows.items(), start=1):
        y = line * pitch
        parts.append(f'<text x="0" y="{y + 13}">{text(name)}</text>')
        parts += [
            f'<rect class="{_CLASSES.get(mark, mark)}" x="{left + pitch * i}" y="{y}" '
            f'width="{_CELL}" height="{_CELL}"><title>{text(name)}, update {step}: '
            f"{_WORDS.get(mark, mark)}</title></rect>"
            for i, (step, mark) in enumerate(zip(steps, marks, strict=True))
        ]
    if bad in steps:
        x = left + pitch * steps.index(bad) - 1.5
        parts.append(
            f'<rect class="bad" x="{x}" y="{pitch - 1.5}" width="{_CELL + 3}" '
            f'height="{pitch * len(rows) + 1}"/>'
        )
    return (
        f'<div class="scroll" tabindex="0"><svg class="heat" width="{width}" height="{height}" '
        f'role="img">{"".join(parts)}</svg></div>'
    )
