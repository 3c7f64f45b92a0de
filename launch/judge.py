"""`python -m launch.judge RUN`: recompute the verdict of a run from its directory, without ranks.

Exit codes: those of the verdict (0, 10, 11); 2 if RUN is no run; 12 if it cannot be read. Writes
nothing; says whether the stored verdict.json still stands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.errors import HarnessError
from harness.report import terminal
from launch import ending, runs


def main(argv: Sequence[str] | None = None) -> int:
    """Judge one run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch.judge", description=__doc__)
    parser.add_argument("run", help="run directory, directory of runs (newest), or `latest`")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    options = parser.parse_args(argv)
    try:
        judged = runs.judge(runs.find(options.run))
    except HarnessError as error:
        print(f"crossrank: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(judged.verdict.to_json(judged.scenario), end="")
        return judged.verdict.conclusion.exit_code
    out = terminal.console()
    terminal.header(out, judged.scenario, judged.tables.plan, f"judged again: {judged.layout.root}")
    terminal.verdict(out, judged.scenario, judged.verdict)
    changed = runs.differences(judged)
    for line in changed:
        out.print(f"differs  {line}", markup=False, soft_wrap=True)
    if not changed:
        out.print("the stored verdict stands", style="dim")
    return judged.verdict.conclusion.exit_code


if __name__ == "__main__":
    ending.run(main)
