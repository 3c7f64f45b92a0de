"""The claims of a scenario as decorated judges: the name, the sentence, and what decides it.

    @symptom(HOLDS, source="kohya-ss/sd-scripts#989")
    def ranks_part(t: Tables) -> Finding:
        \"\"\"When DDP's forward is bypassed the ranks' weights part.\"\"\"
        return negated(ranks_agree(t, "bypassed", "weights"))

The function's name is the claim's name, its docstring the claim as somebody would assert it.
`settles="A27 B31"` names the statements of the two articles (scenarios/articles.yaml) that the
finding decides; `~A27` where the docstring asserts the contrary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.scenario import Claim, Finding, Kind, Outcome

if TYPE_CHECKING:
    from harness.tables import Tables

HOLDS = Outcome.HOLDS
REFUTED = Outcome.REFUTED
Judge = Callable[["Tables"], Finding]


def symptom(expects: Outcome, source: str = "", *, settles: str = "") -> Callable[[Judge], Claim]:
    """Return a decorator: the judge becomes a claim about what a user sees."""
    return _claim(Kind.SYMPTOM, expects, source, settles)


def mechanism(expects: Outcome, source: str = "", *, settles: str = "") -> Callable[[Judge], Claim]:
    """Return a decorator: the judge becomes a claim about why it happens."""
    return _claim(Kind.MECHANISM, expects, source, settles)


def remedy(expects: Outcome, source: str = "", *, settles: str = "") -> Callable[[Judge], Claim]:
    """Return a decorator: the judge becomes a claim about what helps."""
    return _claim(Kind.REMEDY, expects, source, settles)


def cost(expects: Outcome, source: str = "", *, settles: str = "") -> Callable[[Judge], Claim]:
    """Return a decorator: the judge becomes a claim about what it takes."""
    return _claim(Kind.COST, expects, source, settles)


def _claim(kind: Kind, expects: Outcome, source: str, settles: str) -> Callable[[Judge], Claim]:
    def claim(judge: Judge) -> Claim:
        text = " ".join((judge.__doc__ or "").split())
        assert text, f"{judge.__name__} has no docstring, which is to be the claim's sentence"
        return Claim(
            name=judge.__name__,
            kind=kind,
            text=text,
            expects=expects,
            judge=judge,
            source=source,
            settles=tuple(settles.split()),
        )

    return claim
