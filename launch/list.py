"""`python -m launch.list`: every scenario by family, in one line each, and how it last ended here.

Imports no torch, and nothing that has to be installed.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scenarios
from harness.errors import HarnessError, UsageError, did_you_mean
from harness.plural import number_of
from harness.scenario import Scenario
from launch import ending, newest, words
from launch.environment import torch_version
from launch.newest import Ended
from launch.words import Key

KEYS: Mapping[str, Key] = {
    "claims": Key(about="list every claim, too", read=words.switched, default=False),
    "family": Key(about="only this family", read=words.text, default=""),
    "json": Key(about="print JSON", read=words.switched, default=False),
    "results": Key(about="directory of results", read=words.path, default=Path("results")),
}
LEAST = 46
"""Columns that a title needs beside name and ending; with fewer it stands below them."""
SAID = {"as_expected": "as expected", "unexpected": "UNEXPECTED", "inconclusive": "INCONCLUSIVE"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list; returns the exit code.

    Raises:
        HarnessError: if the family is not known, or a folder of scenarios is none.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    typed = words.parse(arguments, KEYS, f"{__doc__}\nmake list")
    found, code = _load()
    if typed["family"]:
        found = _of_family(found, typed["family"])
    last = {name: next(newest.ended(name, typed["results"]), None) for name in found}
    if typed["json"]:
        print(json.dumps([_about(name, found[name], last[name]) for name in found], indent=2))
    else:
        _show(found, last, claims=typed["claims"])
    return code


def _load() -> tuple[dict[str, Scenario], int]:
    """Return the scenarios that can be imported, and the exit code that tells of the others."""
    found: dict[str, Scenario] = {}
    code = 0
    torch = torch_version()
    for name in scenarios.names():
        try:
            found[name] = scenarios.load(name).on(torch)
        except HarnessError as error:
            # One broken file does not hide the others.
            print(f"crossrank: {error}", file=sys.stderr)
            code = error.exit_code
    return found, code


def _of_family(found: Mapping[str, Scenario], family: str) -> dict[str, Scenario]:
    kept = {name: item for name, item in found.items() if item.family == family}
    if not kept:
        legal = sorted({item.family for item in found.values()})
        raise UsageError(
            f"no family {family!r}{did_you_mean(family, legal)}\nlegal: {', '.join(legal)}"
        )
    return kept


def _about(name: str, item: Scenario, last: Ended | None) -> dict[str, Any]:
    return {
        "scenario": name,
        "title": item.title,
        "family": item.family,
        "cause": item.cause,
        "min_ranks": item.min_ranks,
        "arms": [arm.name for arm in item.arms],
        "claims": [
            {
                "claim": claim.name,
                "kind": claim.kind.value,
                "text": claim.text,
                "expects": claim.expects.value,
            }
            for claim in item.claims
        ],
        "last": {
            "run": str(last.layout.root),
            "gpus": last.plan.world_size,
            "conclusion": last.verdict["conclusion"],
        }
        if last
        else None,
    }


def _show(found: Mapping[str, Scenario], last: Mapping[str, Ended | None], *, claims: bool) -> None:
    shelves = defaultdict(list)
    for name, item in found.items():
        shelves[item.family].append(name)
    ends = {name: _ending(run) for name, run in last.items()}
    width = max(map(len, found), default=0)
    wide = max(map(len, ends.values()), default=0)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    narrow = columns is not None and columns < width + wide + LEAST
    for family in sorted(shelves):
        print(family)
        for name in shelves[family]:
            head = f"  {name:{width}}  {ends[name]:{wide}}"
            if narrow:
                print(head.rstrip())
                _fill("    ", found[name].title, columns)
            else:
                _fill(f"{head}  ", found[name].title, columns)
            for claim in found[name].claims if claims else ():
                indent = f"{'':{4 if narrow else width + 4}}- {claim.expects.value:7}  "
                _fill(indent, claim.text, columns)
    ran = sum(run is not None for run in last.values())
    print(f"\n{number_of(len(found), 'scenario')}, {ran} have run here")
    print("make repro scenario=NAME gpus=4    make show scenario=NAME    make corpus gpus=4")


def _fill(before: str, text: str, columns: int | None) -> None:
    """Print a text behind what stands before it; on a terminal its lines break below each other."""
    if columns is None:
        print(before + text)
        return
    lines = textwrap.wrap(text, max(columns - len(before), 20), break_on_hyphens=False)
    print(
        "\n".join((before if i == 0 else " " * len(before)) + line for i, line in enumerate(lines))
    )


def _ending(run: Ended | None) -> str:
    if run is None:
        return "-"
    said = SAID.get(run.verdict["conclusion"], str(run.verdict["conclusion"]))
    return f"{said}, {number_of(run.plan.world_size, 'rank')}"


if __name__ == "__main__":
    ending.run(main)
