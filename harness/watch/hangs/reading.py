"""Reads the user's source around two lines: which loop was left, what guards a line. No torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_RANK_WORDS = ("rank", "master", "main_process", "is_main", "is_chief", "global_zero")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of the user's."""

    path: str
    line: int
    over: str
    """What it runs over, or its condition."""
    counted: bool
    """It runs over `range(...)`, or a condition."""
    left_by: int | None
    """Line of the condition under which it is left, if there is one."""
    continued_by: int | None
    """Line of the condition under which the rest of the body is skipped."""


def loops_left(path: str, inside: int, outside: int) -> list[Loop]:
    """Return loops around one line that another one behind them is not in, the outermost first."""
    return [
        _described(path, loop)
        for loop in _loops(path, inside)
        if not _holds(loop, outside) and outside > (loop.end_lineno or loop.lineno)
    ]


def loops_apart(path: str, inside: int, outside: int) -> list[Loop]:
    """Return loops around one line that another line of the same run is not in, outermost first.

    The other line is behind them, or in the next round of a loop around both.
    """
    around = _loops(path, inside)
    left = [loop for loop in around if not _holds(loop, outside)]
    behind = all(outside > (loop.end_lineno or loop.lineno) for loop in left)
    return [_described(path, loop) for loop in left] if behind or len(left) < len(around) else []


def loops_of(path: str, line: int) -> list[Loop]:
    """Return the loops around a line, the outermost first."""
    return [_described(path, loop) for loop in _loops(path, line)]


def rank_guard(path: str, line: int) -> str | None:
    """Return the condition on the rank under which a line is run, if there is one."""
    found = None
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.If) and (
            any(_holds(child, line) for child in node.body + node.orelse)
        ):
            test = ast.unparse(node.test)
            if any(word in test.lower() for word in _RANK_WORDS):
                found = test
    return found


def same_branching(path: str, one: int, other: int) -> bool:
    """Say whether two lines stand in opposite branches of one condition."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.If) and node.orelse:
            there = [
                (any(_holds(c, one) for c in part), any(_holds(c, other) for c in part))
                for part in (node.body, node.orelse)
            ]
            if there in ([(True, False), (False, True)], [(False, True), (True, False)]):
                return True
    return False


def _tree(path: str) -> ast.AST:
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _loops(path: str, line: int) -> list[ast.For | ast.AsyncFor | ast.While]:
    found = [
        node
        for node in ast.walk(_tree(path))
        if isinstance(node, _LOOPS) and _holds(node, line) and node.lineno < line
    ]
    # A function defined in a loop would be one more; that is rare enough.
    return sorted(found, key=lambda node: node.lineno)


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _described(path: str, loop: ast.For | ast.AsyncFor | ast.While) -> Loop:
    over = loop.test if isinstance(loop, ast.While) else loop.iter
    endless = isinstance(over, ast.Constant)
    left = next(_under_condition(loop.body, ast.Break | ast.Return, ()), None)
    if left is None and isinstance(loop, ast.While) and not endless:
        left = loop.lineno
    return Loop(
        path=path,
        line=loop.lineno,
        over=ast.unparse(over),
        counted=isinstance(loop, ast.While) or ast.unparse(over).startswith(("range(", "trange(")),
        left_by=left,
        continued_by=next(_under_condition(loop.body, ast.Continue, ()), None),
    )


def _under_condition(
    body: list[ast.stmt], kind: type | object, tests: tuple[int, ...]
) -> Iterator[int]:
    """Yield the line of the innermost condition around each statement of a kind, in this loop."""
    for statement in body:
        if isinstance(statement, kind) and tests:  # type: ignore[arg-type]
            yield tests[-1]
        if isinstance(statement, ast.If):
            yield from _under_condition(statement.body, kind, (*tests, statement.lineno))
            yield from _under_condition(statement.orelse, kind, (*tests, statement.lineno))
        elif isinstance(statement, ast.With | ast.AsyncWith | ast.Try):
            yield from _under_condition(statement.body, kind, tests)
            for handler in getattr(statement, "handlers", []):
                yield from _under_condition(handler.body, kind, (*tests, handler.lineno))
        elif isinstance(statement, _LOOPS) and kind is not ast.Continue:
            # A break belongs to the inner loop, a return leaves this one too.
            yield from _under_condition(statement.body, ast.Return, tests)
