"""`python -m launch.report RUN`: write report.html, verdict.md and junit.xml of a run again.

Exit codes: 0 written, 2 RUN is no run, 12 it cannot be read or written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.errors import HarnessError
from launch import ending, runs
from launch.reproduce import write_reports


def main(argv: Sequence[str] | None = None) -> int:
    """Write the reports of one run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch.report", description=__doc__)
    parser.add_argument("run", help="run directory, directory of runs (newest), or `latest`")
    options = parser.parse_args(argv)
    try:
        judged = runs.judge(runs.find(options.run))
        layout = judged.layout
        facts = runs.read_json(layout.environment) if layout.environment.exists() else {}
        text = layout.config.read_text(encoding="utf-8") if layout.config.exists() else ""
    except HarnessError as error:
        print(f"crossrank: {error}", file=sys.stderr)
        return error.exit_code
    notes = write_reports(
        layout, judged.scenario, judged.name, judged.tables, judged.verdict, facts, text
    )
    for note in notes:
        print(f"crossrank: {note}", file=sys.stderr)
    for path in (layout.report, layout.markdown, layout.junit):
        print(path)
    return 12 if notes else 0


if __name__ == "__main__":
    ending.run(main)
