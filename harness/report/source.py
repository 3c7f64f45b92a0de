"""The source of the functions in which the arms of a scenario differ, with light highlighting."""

from __future__ import annotations

import inspect
import io
import keyword
import re
import sys
import tokenize
from dataclasses import dataclass
from html import escape
from pathlib import Path

from harness.report.wording import printable
from harness.scenario import Scenario

_BRANCH = re.compile(r"\barm\s*(\[|\.(get|options|name|role)\b)")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One function as it stands in the scenario's module."""

    name: str
    file: str
    first: int
    """Number of its first line."""
    lines: tuple[str, ...]

    @property
    def branches(self) -> list[int]:
        """Numbers of the lines that read an option of the arm."""
        return [
            number
            for number, line in enumerate(self.lines, start=self.first)
            if _BRANCH.search(line)
        ]

    def html(self) -> str:
        """Return the lines as highlighted HTML; the branch of the arm is marked."""
        marked = set(self.branches)
        rows = []
        for number, line in enumerate(_highlight(self.lines), start=self.first):
            tag = "mark" if number in marked else "span"
            rows.append(f'<{tag} class="row" data-n="{number}">{line}\n</{tag}>')
        return f'<pre class="code" tabindex="0"><code>{"".join(rows)}</code></pre>'


def sources(scenario: Scenario) -> tuple[list[Source], list[str]]:
    """Return the functions that `scenario.differs` names, and the names without a source."""
    run = inspect.unwrap(scenario.run)
    module = sys.modules.get(getattr(run, "__module__", ""))
    found, absent = [], []
    for name in scenario.differs:
        target: object = module
        for part in name.split("."):
            target = getattr(target, part, None)
        if target is None and name == getattr(run, "__name__", "run"):
            target = run
        try:
            lines, first = inspect.getsourcelines(target)  # type: ignore[arg-type]
            file = inspect.getsourcefile(target) or ""  # type: ignore[arg-type]
        except (OSError, TypeError):
            absent.append(name)
            continue
        path = Path(file)
        stripped = tuple(line.rstrip("\r\n") for line in lines)
        shown = f"{path.parent.name}/{path.name}"
        found.append(Source(name=name, file=shown, first=max(first, 1), lines=stripped))
    return found, absent


def _highlight(lines: tuple[str, ...]) -> list[str]:
    spans: list[list[tuple[int, int, str]]] = [[] for _ in lines]
    try:
        before = ""
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
            kind = _kind(token, before)
            before = token.string
            if not kind:
                continue
            (row, start), (last, end) = token.start, token.end
            for at in range(row - 1, min(last, len(lines))):
                left = start if at == row - 1 else 0
                right = end if at == last - 1 else len(lines[at])
                spans[at].append((left, right, kind))
    except (tokenize.TokenError, SyntaxError):
        pass  # a fragment that does not tokenize is shown as far as it went, in plain text
    return [_colour(line, marks) for line, marks in zip(lines, spans, strict=True)]


def _kind(token: tokenize.TokenInfo, before: str) -> str:
    if token.type == tokenize.COMMENT:
        return "c"
    if token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING"):
        return "s"
    if token.type == tokenize.NUMBER:
        return "n"
    if token.type == tokenize.NAME and before in ("def", "class"):
        return "d"
    if token.type == tokenize.NAME and keyword.iskeyword(token.string):
        return "k"
    return ""


def _colour(line: str, marks: list[tuple[int, int, str]]) -> str:
    parts, at = [], 0
    for left, right, kind in marks:
        parts.append(escape(printable(line[at:left])))
        parts.append(f'<i class="{kind}">{escape(printable(line[left:right]))}</i>')
        at = right
    return "".join([*parts, escape(printable(line[at:]))])
