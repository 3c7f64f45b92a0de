"""`python -m launch.corpus gpus=4`: every scenario, one directory, one table, one page.

Exit codes: 0 every finding is the one its scenario expects (what is not for so many ranks, or not
for this machine, is skipped), 10 a finding is another one, 11 a run is inconclusive or failed,
2 the command line is wrong, 12 nothing can run here, 130 interrupted: `continue=latest` goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from launch import ending, words
from launch.corpus.record import Corpus, find
from launch.corpus.session import ASKED, Session
from launch.words import Key

KEYS: Mapping[str, Key] = {
    "gpus": Key(
        about="numbers of ranks: gpus=4, or gpus=2,3,4,8", read=words.wholes(1, 128), default=[4]
    ),
    "scenarios": Key(about="only these, comma-separated", read=words.names, default=[]),
    "family": Key(about="only those of one family: make list", read=words.text, default=""),
    "seed": Key(about="of data, weights and permutations", read=words.whole(0), default=0),
    "device": Key(
        about="auto, cpu or cuda", read=words.one_of("auto", "cpu", "cuda"), default="auto"
    ),
    "launch": Key(
        about="how ranks are started: auto, warm or torchrun",
        read=words.one_of("auto", "warm", "torchrun"),
        default="auto",
    ),
    "ranks": Key(
        about="so many ranks at a time; without it as many as the cores bear",
        read=words.whole(1),
        default=0,
    ),
    "continue": Key(
        about="latest, or a directory: run what is missing there", read=words.text, default=""
    ),
    "results": Key(about="directory of results", read=words.path, default=Path("results")),
    "dry_run": Key(about="say what would run, start nothing", read=words.switched, default=False),
    "json": Key(about="print corpus.json", read=words.switched, default=False),
    "quiet": Key(about="print its path only", read=words.switched, default=False),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the corpus; returns the exit code.

    Raises:
        HarnessError: if nothing can be run.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    typed = words.parse(arguments, KEYS, f"{__doc__}\nmake corpus")
    session = Session(typed, _continued(typed))
    return session.dry_run() if typed["dry_run"] else session.run()


def _continued(typed: dict[str, Any]) -> Path | None:
    """Return the directory to go on in; what was asked for then is put into `typed`."""
    if not typed["continue"]:
        return None
    folder = find(typed["continue"], typed["results"])
    asked = Corpus.read(folder).asked
    for key in ASKED:
        if typed[key] not in (KEYS[key].default, asked[key]):
            shown = typed[key]
            raise UsageError(
                f"{key}={shown} is not what {folder.name} was begun with ({asked[key]})\n"
                f"type continue={typed['continue']} alone, or start a new one without it"
            )
        typed[key] = asked[key]
    return folder


if __name__ == "__main__":
    ending.run(main)
