"""What the articles assert (scenarios/articles.yaml), and which claims of scenarios decide it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scenarios
from harness.errors import RecordError
from harness.scenario import Outcome

ARTICLES = Path(__file__).resolve().parent.parent / "scenarios" / "articles.yaml"
CONTRARY = "~"
"""Before an id: the claim asserts the contrary of the statement."""
PARTLY = "partly"
NOT_RUN = "not run"
NOT_HERE = "not run here"
FIELDS = ("section", "says", "number", "reason")


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One assertion of an article."""

    id: str
    """The article's letter and a number."""
    section: str
    says: str
    number: str = ""
    """The article's own figure, if it gives one."""
    reason: str = ""
    """Why it cannot be decided by running it here; empty where it can."""


@dataclass(frozen=True, kw_only=True)
class Settling:
    """A claim that decides a statement."""

    scenario: str
    claim: str
    expects: Outcome
    contrary: bool
    """True if the claim asserts the contrary of the statement."""

    def of(self, outcome: str) -> str:
        """Return what this outcome of the claim says of the statement."""
        turned = {"holds": "refuted", "refuted": "holds"}
        return turned.get(outcome, outcome) if self.contrary else outcome


@functools.cache
def articles() -> dict[str, str]:
    """Return what each article is, by its letter."""
    return {str(letter): str(about) for letter, about in _file()["articles"].items()}


@functools.cache
def statements() -> dict[str, Statement]:
    """Return all statements by id, in the order of the file.

    Raises:
        RecordError: if the file cannot be read or an entry has other fields; names it.
    """
    found = {}
    for name, fields in _file()["statements"].items():
        wrong = [key for key in fields if key not in FIELDS]
        wrong += [f"no {key}" for key in FIELDS[:2] if not fields.get(key)]
        if wrong:
            raise RecordError(f"{ARTICLES.name}: {name}: {', '.join(map(str, wrong))}")
        found[str(name)] = Statement(id=str(name), **{k: str(v) for k, v in fields.items()})
    return found


def _file() -> Mapping[str, Any]:
    from omegaconf import OmegaConf

    try:
        data: Any = OmegaConf.to_container(OmegaConf.load(ARTICLES))
        return {"articles": dict(data["articles"]), "statements": dict(data["statements"])}
    except Exception as error:
        raise RecordError(f"cannot read {ARTICLES}: {error}") from error


def settling(names: Iterable[str]) -> dict[str, list[Settling]]:
    """Return, for each id that a claim of these scenarios names, the claims that do."""
    found: dict[str, list[Settling]] = {}
    for name in names:
        for claim in scenarios.load(name).claims:
            for word in claim.settles:
                item = Settling(
                    scenario=name,
                    claim=claim.name,
                    expects=claim.expects,
                    contrary=word.startswith(CONTRARY),
                )
                found.setdefault(word.removeprefix(CONTRARY), []).append(item)
    return found


def merged(outcomes: Sequence[str]) -> str:
    """Return the finding on a statement from what each claim that decides it says.

    Claims that differ decide it `partly`, whatever a further one leaves open; else one that is
    unknown, or was not run, outweighs those that agree.
    """
    definite = set(outcomes) & {"holds", "refuted"}
    if len(definite) > 1:
        return PARTLY
    for weak in ("unknown", NOT_RUN):
        if weak in outcomes:
            return weak
    return definite.pop() if definite else NOT_RUN
