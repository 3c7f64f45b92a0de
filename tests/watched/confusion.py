"""The confusion matrix: true cause by diagnosed cause, over all arms and programs.

python -m tests.watched.confusion [--ranks 3] [--seeds 0 1 ...] [--only NAME ...] [--out FILE]

Writes it as Markdown, the order of rows and columns depending on nothing but the names.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scenarios
from tests.watched.truth import Truth, alone, truths
from tests.watching import torchrun

SILENT, NOT_KNOWN = "(silent)", "(not known)"
NOT_OBSERVED, NO_ANSWER = "(not observed)", "(no answer)"
RANKS = 3
HANG_S = 3
"""Seconds after which a rank that waits is stuck; more than a busy machine takes for a step."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the watcher said of a case, beside what is true."""

    truth: Truth
    said: str
    """Name of the first cause, or one of the words above."""
    answer: Mapping[str, Any]

    @property
    def is_right(self) -> bool:
        """Whether the cause is named, or nothing is said where nothing is wrong."""
        quiet = (SILENT, NOT_OBSERVED)
        return self.said == self.truth.cause or (self.truth.cause is None and self.said in quiet)

    @property
    def is_misnamed(self) -> bool:
        """Whether a cause is named that is not the true one."""
        return not self.said.startswith("(") and self.said != self.truth.cause

    def misplaced(self) -> str:
        """Say in which respect the place that was found is not the true one; '' if it is."""
        place, found = self.truth.place, self.answer.get("divergence")
        if place is None:
            return ""
        if found is None:
            return "no divergence"
        first = found["differences"][0]
        groups = [tuple(group) for group in first["groups"]]
        largest = max(map(len, groups))
        majority = 2 * largest > sum(map(len, groups))
        odd = sorted(r for g in groups if not majority or len(g) < largest for r in g)
        seen = tuple(odd) if majority else ()
        wrong = []
        if (found["step"], found["phase"]) != (place.step, place.phase):
            wrong.append(f"{found['phase']} {found['step']}, not {place.phase} {place.step}")
        if place.tensors and first["name"] not in place.tensors:
            wrong.append(f"{first['name']}, not one of {', '.join(place.tensors)}")
        if seen != place.odd:
            wrong.append(f"odd ranks {seen}, not {place.odd}")
        return "; ".join(wrong)


def watch(out: Path, true: Mapping[str, Truth], ranks: int = RANKS) -> dict[str, Outcome]:
    """Run the cases under the watcher, in one set of ranks, and return what it said of each."""
    cases = {
        name: ({"params": dict(truth.params)} if truth.params is not None else {})
        | ({"audit": 1} if truth.audit else {})
        for name, truth in true.items()
    }
    (out / "cases.json").write_text(json.dumps(cases))
    ended = torchrun("-m", "tests.watched.arms", out, out / "cases.json", ranks=ranks, seconds=500)
    if ended.returncode:
        raise RuntimeError(f"the ranks ended with {ended.returncode}\n{ended.stderr[-4000:]}")
    return {name: _outcome(out, name, truth) for name, truth in true.items()}


def watch_alone(out: Path, true: Mapping[str, Truth], ranks: int = RANKS) -> dict[str, Outcome]:
    """Run arms that may hang or raise, each as a training script of its own."""
    found = {}
    for name, truth in true.items():
        scenario, arm = name.split("/")
        answer = out / f"{scenario}.{arm}.json"
        words = ("-m", "harness.watch", "--hang-timeout", HANG_S, "--json", answer)
        peers = scenarios.load(scenario).arm(arm).ranks or ranks
        torchrun(*words, "-m", "tests.watched.alone", scenario, arm, out / "records", ranks=peers)
        if answer.exists():
            content = json.loads(answer.read_text())
            found[name] = Outcome(truth=truth, said=said(content), answer=content)
        else:
            found[name] = Outcome(truth=truth, said=NO_ANSWER, answer={"headline": "none given"})
        print(f"{name}: {found[name].said}", file=sys.stderr)
    return found


def _outcome(out: Path, name: str, truth: Truth) -> Outcome:
    # As tests.watched.arms names its files; importing it would import torch.
    path = out / f"{name.replace('/', '.').replace(' --', '.')}.json"
    if not path.exists():
        errors = sorted(out.glob(f"{path.stem}.rank*.error"))
        why = errors[0].read_text().splitlines()[-1] if errors else ""
        return Outcome(truth=truth, said=NO_ANSWER, answer={"headline": why})
    answer = json.loads(path.read_text())["answer"]
    return Outcome(truth=truth, said=said(answer), answer=answer)


def said(answer: Mapping[str, Any]) -> str:
    """Return the cause that an answer begins with, or how it does without one."""
    if answer["exit_code"] == 22:
        return NOT_OBSERVED
    if answer["exit_code"] == 0:
        return SILENT
    first = next(iter(answer["diagnoses"]), None)
    if first is None or first["strength"] == "fact":
        return NOT_KNOWN
    if answer["divergence"] is not None and not first["explains"]:
        return NOT_KNOWN
    return str(first["cause"])


def matrix(outcomes: Mapping[str, Outcome]) -> Counter[tuple[str, str]]:
    """Count cases by true and diagnosed cause; `unseen` ones are not among them."""
    return Counter(
        (one.truth.cause, one.said)
        if one.truth.cause
        else ("nothing wrong", SILENT if one.said == NOT_OBSERVED else one.said)
        for one in outcomes.values()
        if not one.truth.unseen
    )


def markdown(outcomes: Mapping[str, Outcome]) -> str:
    """Return a row for each true cause: how many cases, how many named, and as what else."""
    counts = matrix(outcomes)
    causes = [*sorted({true for true, _ in counts} - {"nothing wrong"}), "nothing wrong"]
    lines = ["| true cause | cases | right | said instead |", "| --- | --: | --: | --- |"]
    for true in causes:
        row = {said_: count for (of, said_), count in counts.items() if of == true}
        right = row.pop(SILENT if true == "nothing wrong" else true, 0)
        instead = ", ".join(f"{name} {count}" for name, count in sorted(row.items()))
        lines.append(f"| {true} | {right + sum(row.values())} | {right} | {instead} |")
    audited = sorted(name for name, one in outcomes.items() if one.truth.audit)
    if audited:
        lines += ["", f"Seen with `--audit` only: {', '.join(audited)}."]
    unseen = sorted((n, one.truth.unseen) for n, one in outcomes.items() if one.truth.unseen)
    if unseen:
        lines += ["", "Not seen from inside such a run, and not counted:", ""]
        lines += [f"- {name}: {why}" for name, why in unseen]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the matrix, and what is wrong in it case by case."""
    parser = argparse.ArgumentParser(prog="tests.watched.confusion", description=__doc__)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=(), help="run whole programs with these seeds only"
    )
    parser.add_argument("--only", nargs="*", default=(), help="beginnings of names")
    parser.add_argument(
        "--alone", action="store_true", help="also run the arms that hang or raise, one by one"
    )
    parser.add_argument("--out", type=Path, help="write the Markdown there")
    options = parser.parse_args(argv)

    def wanted(cases: Mapping[str, Truth]) -> dict[str, Truth]:
        only = tuple(options.only)
        return {name: truth for name, truth in cases.items() if not only or name.startswith(only)}

    true = wanted(truths(options.only))
    if options.seeds:
        true = {
            f"{name} --seed {seed}": truth
            for name, truth in true.items()
            if name.startswith("programs/")
            for seed in options.seeds
        }
    with tempfile.TemporaryDirectory() as folder:
        outcomes = watch(Path(folder), true, options.ranks) if true else {}
        if options.alone:
            outcomes |= watch_alone(Path(folder), wanted(alone(options.only)), options.ranks)
    text = markdown(outcomes)
    if options.out:
        options.out.write_text(text)
    print(text)
    wrong = 0
    for name, one in outcomes.items():
        where = "" if one.truth.unseen else one.misplaced()
        if (one.is_right or one.truth.unseen) and not where:
            continue
        wrong += 1
        print(f"{name}: {one.truth.cause} -> {one.said} {where}\n    {one.answer.get('headline')}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
