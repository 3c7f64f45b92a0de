"""`python -m launch.list`: every scenario by family, with its claims; imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence

import scenarios
from harness.errors import HarnessError
from harness.scenario import Scenario


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch.list", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument("--claims", action="store_true", help="print every claim, too")
    options = parser.parse_args(argv)
    found: dict[str, Scenario] = {}
    code = 0
    try:
        for name in scenarios.names():
            try:
                found[name] = scenarios.load(name)
            except HarnessError as error:
                # One broken file does not hide the others.
                print(f"crossrank: {error}", file=sys.stderr)
                code = error.exit_code
    except HarnessError as error:
        print(f"crossrank: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        rows = [
            {
                "scenario": name,
                "title": item.title,
                "family": item.family,
                "cause": item.cause,
                "min_ranks": item.min_ranks,
                "arms": [arm.name for arm in item.arms],
                "claims": [
                    {
                        "claim": c.name,
                        "kind": c.kind.value,
                        "text": c.text,
                        "expects": c.expects.value,
                    }
                    for c in item.claims
                ],
            }
            for name, item in found.items()
        ]
        print(json.dumps(rows, indent=2))
        return code
    shelves = defaultdict(list)
    for name, item in found.items():
        shelves[item.family].append(name)
    width = max(map(len, found), default=0)
    for family in sorted(shelves):
        print(family)
        for name in shelves[family]:
            item = found[name]
            print(f"  {name:{width}}  {item.title}")
            claims = f"{len(item.claims)} claim{'s' if len(item.claims) != 1 else ''}"
            counts = f"{claims}, {len(item.arms)} arms, gpus >= {item.min_ranks}"
            print(f"  {'':{width}}  {counts}")
            for claim in item.claims if options.claims else ():
                print(f"  {'':{width}}  - {claim.expects.value:7}  {claim.text}")
    print("\nmake repro scenario=NAME gpus=4")
    return code


if __name__ == "__main__":
    sys.exit(main())
