"""`python -m launch.new scenario=NAME`: write the two files that a scenario starts from.

They run at once, and say that their claims are still to be decided. Nothing is overwritten.
Exit codes: 0 written, 2 the name will not do or the files are there already, 12 cannot write.
"""

from __future__ import annotations

import keyword
import re
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import scenarios
from harness.errors import PrerequisiteError, UsageError, did_you_mean
from launch import ending, words
from launch.words import Key

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).resolve().parent / "new_scenario.txt"
VALUES = Path(__file__).resolve().parent / "new_scenario.yaml"
KEYS: Mapping[str, Key] = {
    "scenario": Key(about="its name: small letters, digits and _", read=words.text, needed=True),
    "family": Key(about="the shelf it stands on: make list", read=words.text, default="unsorted"),
    "cause": Key(
        about="its entry in the catalogue of causes; none where only a belief is wrong",
        read=words.text,
        default="",
    ),
    "folder": Key(
        about="a folder of your own, for CROSSRANK_SCENARIOS; without it this project's",
        read=words.path,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the two files; returns the exit code.

    Raises:
        HarnessError: if the name will not do, or the files cannot be written.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    typed = words.parse(arguments, KEYS, f"{__doc__}\nmake new")
    name, folder = typed["scenario"], typed["folder"]
    _check(name, typed["cause"])
    if folder:
        module, values = folder / f"{name}.py", folder / "conf" / "scenario" / f"{name}.yaml"
    else:
        module = ROOT / "scenarios" / f"{name}.py"
        values = ROOT / "conf" / "scenario" / f"{name}.yaml"
    there = [str(path) for path in (module, values) if path.exists()]
    if there:
        raise UsageError(f"{' and '.join(there)} exists already, and nothing is overwritten")
    filled = {"name": name, "family": typed["family"], "cause": typed["cause"]}
    _write(module, string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(filled))
    _write(values, string.Template(VALUES.read_text(encoding="utf-8")).substitute(filled))
    for path in (module, values):
        print(path)
    ours = f"CROSSRANK_SCENARIOS={folder} " if folder else ""
    print(f"\n{ours}make repro scenario={name} gpus=2    runs it as it is: inconclusive")
    print("CONTRIBUTING.md has the checklist")
    return 0


def _check(name: str, cause: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        near = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_0123456789")
        raise UsageError(
            f"scenario={name} will not do: a name has small letters, digits and _, begins with a "
            "letter and is no word of Python's" + (f"\ntype scenario={near}" if near else "")
        )
    if name in scenarios.names():
        raise UsageError(f"there is a scenario {name} already: make show scenario={name}")
    if cause:
        from harness.causes import catalogue

        legal = list(catalogue())
        if cause not in legal:
            raise UsageError(
                f"no cause {cause!r}{did_you_mean(cause, legal)}\n"
                "type `python -m harness.watch causes` to see all; a new one is added first"
            )


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise PrerequisiteError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    ending.run(main)
