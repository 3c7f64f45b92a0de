"""The pieces of markup that every section uses; everything that comes from outside is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from harness.report.wording import printable

LONGEST = 20_000
"""Characters shown of a trace or a configuration; the files have the rest."""


def text(raw: object) -> str:
    """Return anything as escaped text."""
    return escape(printable(str(raw)))


def ident(kind: str, name: str) -> str:
    """Return an id for a named thing that is a legal fragment whatever the name is."""
    safe = "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}" for c in name)
    return f"{kind}-{safe}"


def section(name: str, title: str, body: str) -> str:
    """Return one section with its heading."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{title}</h2>'
        f"{body}</section>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: int = 99) -> str:
    """Return a table in a box that scrolls by itself; cells are HTML, `head` is text.

    A cell that is a whole `<th>` or `<td>` stays one; columns from `numeric` on are numbers.
    """
    columns = "".join(
        f'<th scope="col"{" class=num" if i >= numeric else ""}>{text(name)}</th>'
        for i, name in enumerate(head)
    )
    body = []
    for row in rows:
        cells = [
            cell
            if cell.startswith(("<th", "<td"))
            else f"<td{' class=num' if i >= numeric else ''}>{cell}</td>"
            for i, cell in enumerate(row)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def exact(value: object) -> str:
    """Return a value in full, in words where Python's own would be jargon."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def cut(raw: str, most: int) -> str:
    """Return the first `most` characters, and how many are left out."""
    return raw if len(raw) <= most else f"{raw[:most]} … ({len(raw) - most} more characters)"


def pre(raw: str) -> str:
    """Return a text as it stands, in a box that scrolls by itself."""
    return f'<pre class="code" tabindex="0"><code>{text(cut(raw, LONGEST))}</code></pre>'
