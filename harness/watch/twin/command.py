"""Commands `twin`, the same script at several world sizes, and `diff`, any two recorded runs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.floor import Size
from harness.plural import number_of
from harness.watch.exit_codes import FAULT_FOUND, NOT_OBSERVED, NOTHING_FOUND, STOPPED
from harness.watch.stderr import say
from harness.watch.twin.comparison import Apart, Comparison, compare
from harness.watch.twin.recording import Recording, RecordingError, read

ANSWER = "answer.json"
"""What the watcher found in a run itself, beside what was recorded of it."""
NUDGED = 3
"""Repeats of the first world size from which the floor is taken."""
USAGE_TWIN = "python -m harness.watch twin --nproc 1,4 [options] train.py ARGS..."


def twin(arguments: Sequence[str]) -> int:
    """Run a script at several world sizes and compare each with the first; return exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.watch twin",
        usage=USAGE_TWIN,
        description="Run the same script at several world sizes and find the first tensor that is "
        "further apart than rounding takes it. The script must be told the same global batch, "
        "each rank taking its share of it.",
    )
    parser.add_argument(
        "--nproc", default="1,2", metavar="N,M,...", help="numbers of ranks, the reference first"
    )
    parser.add_argument(
        "--floor-runs",
        type=int,
        default=NUDGED,
        metavar="K",
        help="repeats of the reference with parameters moved by one rounding step, from which the "
        f"floor is measured (default {NUDGED})",
    )
    parser.add_argument("--folder", help="keep the recorded runs here")
    parser.add_argument("--json", metavar="FILE", help="write the comparison as JSON")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    sizes = _sizes(parser, options.nproc)
    if options.floor_runs < 1:
        parser.error("--floor-runs must be 1 or more: without it there is no floor to judge by")
    if not Path(options.script).is_file():
        parser.error(f"cannot read the script {options.script!r}")
    folder = Path(options.folder or tempfile.mkdtemp(prefix="crossrank-twin-")).absolute()
    runs = [(f"ranks{n}", n, 0) for n in sizes]
    runs += [(f"ranks{sizes[0]}-nudged{k}", sizes[0], k) for k in range(1, options.floor_runs + 1)]
    own_codes: list[int] = []
    for name, ranks, nudge in runs:
        command = launch(folder / name, ranks, nudge, [options.script, *options.arguments])
        if options.dry_run:
            print(" ".join(command))
            continue
        ended = _run(command, folder / name, name)
        own = _own_answer(folder / name)
        if own is not None:
            own_codes.append(own[0])
            print(f"{number_of(ranks, 'rank')}: the run itself: {own[1]}", flush=True)
        if ended:
            own_codes.append(NOT_OBSERVED)
            say(f"{name} ended with exit code {ended}; see {folder / name}/output.txt")
    if options.dry_run:
        return NOTHING_FOUND
    try:
        recorded = {name: read(folder / name) for name, _, _ in runs}
    except RecordingError as error:
        say(str(error))
        return _worst([*own_codes, NOT_OBSERVED])
    reference = recorded[runs[0][0]]
    nudged = [recorded[name] for name, _, nudge in runs if nudge]
    codes, contents = own_codes, []
    for name, ranks, nudge in runs[1:]:
        if nudge:
            continue
        found = compare(reference, recorded[name], nudged)
        code, lines = answer(found, reference, recorded[name], number_of(ranks, "rank"))
        print("\n".join(lines))
        codes.append(code)
        contents.append({"ranks": [sizes[0], ranks], "exit_code": code, **found.to_json()})
    say(f"recorded runs: {folder}")
    if options.json:
        Path(options.json).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return _worst(codes)


def _worst(codes: Sequence[int]) -> int:
    """Return the code of a fault, if there is one: what could not be observed takes none back."""
    return max(codes, key=lambda code: (code in (FAULT_FOUND, STOPPED), code), default=NOT_OBSERVED)


def diff(arguments: Sequence[str]) -> int:
    """Compare two recorded runs; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.watch diff",
        description="Compare two runs that were recorded with `-m harness.watch --record FOLDER`: "
        "two versions of torch, two backends, before and after a commit.",
    )
    parser.add_argument("a", metavar="A", help="folder of the first run")
    parser.add_argument("b", metavar="B", help="folder of the second run")
    parser.add_argument(
        "--floor",
        action="append",
        default=[],
        metavar="FOLDER",
        help="a repeat of A recorded with --nudge SEED as well; may be given several times",
    )
    parser.add_argument("--json", metavar="FILE", help="write the comparison as JSON")
    options = parser.parse_args(arguments)
    try:
        a, b = read(Path(options.a)), read(Path(options.b))
        nudged = [read(Path(one)) for one in options.floor]
    except RecordingError as error:
        say(str(error))
        return 2
    found = compare(a, b, nudged)
    code, lines = answer(found, a, b, options.b)
    print("\n".join(lines))
    if options.json:
        content = {"exit_code": code, **found.to_json()}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return code


def launch(folder: Path, ranks: int, nudge: int, script: Sequence[str]) -> list[str]:
    """Return the command line that records one run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "harness.watch", "--quiet"]
    command += [
        "--json",
        str(folder / ANSWER),
        "--record",
        str(folder),
        *(["--nudge", str(nudge)] if nudge else []),
    ]
    return [*command, *script]


def _own_answer(folder: Path) -> tuple[int, str] | None:
    """Return exit code and first line of what the watcher found in a run itself, if anything."""
    try:
        content = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    code = content["exit_code"]
    return (code, content["headline"]) if code in (FAULT_FOUND, STOPPED) else None


def answer(
    found: Comparison, a: Recording, b: Recording, title: str
) -> tuple[int, tuple[str, ...]]:
    """Return exit code and text for a comparison."""
    below = []
    if found.updates[0] != found.updates[1]:
        below.append(
            f"  note     {number_of(found.updates[0], 'update')} with "
            f"{number_of(a.world_size, 'rank')}, {found.updates[1]} with {b.world_size}: it is the "
            "same training only with the same global batch"
        )
    for names, run in zip(found.only, (a, b), strict=True):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            below.append(f"  note     only in {run.folder.name}: {shown}")
    if not found.compared:
        return NOT_OBSERVED, (f"{title}: could not compare: no tensor has a name in both", *below)
    table = _table(found.places)
    about = f"{number_of(found.compared, 'tensor')}, {number_of(min(found.updates), 'update')}"
    if found.first:
        return FAULT_FOUND, (_first(found, a, b, title), *table, *below)
    if found.equal:
        return NOTHING_FOUND, (f"{title}: equal to the last bit, {about}", *below)
    if any(one.size is None for one in found.places):
        return NOT_OBSERVED, (
            f"{title}: differs, and rounding cannot be told from a fault: no floor was measured, "
            f"{about}",
            *table,
            "  floor    record A once more with --nudge 1, and give its folder with --floor",
            *below,
        )
    highest = max(one.distance / one.floor for one in found.places if one.floor)
    if any(one.size is Size.BETWEEN for one in found.places):
        return NOT_OBSERVED, (
            f"{title}: undecided, at most {highest:.3g} rounding floors apart, {about}",
            *table,
            *below,
        )
    return NOTHING_FOUND, (
        f"{title}: the same training, at most {highest:.3g} rounding floors apart, {about}",
        *table,
        *below,
    )


def _first(found: Comparison, a: Recording, b: Recording, title: str) -> str:
    one = found.first[0]
    what = "gradient" if one.phase == "gradients" else "parameter"
    floors = f"{one.distance / one.floor:.3g} floors" if one.floor else "there is no floor"
    more = f" and {len(found.first) - 1} more of {found.compared}" if len(found.first) > 1 else ""
    line = f"{title}: update {one.update}, {what} {one.name}{more}: {one.distance:.3g} of its norm"
    line += f" from {number_of(a.world_size, 'rank')} ({floors})"
    for number, meaning in _factors(a.world_size, b.world_size):
        if _is_factor(found.first, number):
            return f"{line}; all of them are {one.factor:.6g} times it, {meaning}"
    return line


def _factors(a: int, b: int) -> list[tuple[float, str]]:
    if a == b:
        return []
    return [
        (b / a, "as if the loss were multiplied by the number of ranks: loss_scaled_by_world"),
        (a / b, "as if the loss were divided by the number of ranks: loss_divided_by_world"),
    ]


def _is_factor(first: Sequence[Apart], number: float) -> bool:
    """Say whether a factor explains all but a hundredth of each distance."""
    return all(
        abs(one.factor / number - 1) < 1e-3 and one.residual < one.distance / 100 for one in first
    )


def _table(places: Sequence[Apart]) -> list[str]:
    """Show some places, denser at the beginning."""
    updates = sorted({one.update for one in places})
    shown = {u for i, u in enumerate(updates) if i < 4 or i == len(updates) - 1 or i & (i - 1) == 0}
    lines = [
        "  update   phase        distance    floor    floors   tensor furthest above its floor"
    ]
    for one in places:
        if one.update in shown:
            floor = "-" if one.floor is None else f"{one.floor:.2g}"
            times = f"{one.distance / one.floor:.3g}" if one.floor else "-"
            lines.append(
                f"  {one.update:>6}   {one.phase:<10}   {one.distance:>8.2g} {floor:>8} "
                f"{times:>9}   {one.name}"
            )
    return lines


def _run(command: Sequence[str], folder: Path, name: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("rank*.projections.jsonl"), folder / ANSWER):
        old.unlink(missing_ok=True)
    say(f"{name} ...")
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        return subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=kept, check=False
        ).returncode


def _sizes(parser: argparse.ArgumentParser, typed: str) -> list[int]:
    try:
        sizes = [int(word) for word in typed.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) < 2 or min(sizes) < 1 or len(set(sizes)) != len(sizes):
        parser.error(
            f"--nproc {typed!r} must be two or more different numbers of ranks, such as 1,4"
        )
    return sizes
