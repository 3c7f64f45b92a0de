"""The claims of a scenario as decorated judges: the name, the sentence, and what decides it.

    @symptom(HOLDS, source="kohya-ss/sd-scripts#989")
    def ranks_part(t: Tables) -> Finding:
        \"\"\"When DDP's forward is bypassed the ranks' weights part.\"\"\"
        return negated(ranks_agree(t, "bypassed", "weights"))

The function's name is the claim's name, its docstring the claim as somebody would assert it.
`settles="A27 B31"` names the statements of the two articles (scenarios/articles.yaml) that the
finding decides; `~A27` where the docstring asserts the contrary. `before={"2.10": HOLDS}` says what
torch before 2.10 does, where torch itself has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from harness.scenario import Claim, Finding, Kind, Outcome

if TYPE_CHECKING:
    from harness.tables import Tables

HOLDS = Outcome.HOLDS
REFUTED = Outcome.REFUTED
Judge = Callable[["Tables"], Finding]
Before = Mapping[str, Outcome]
NEVER: Before = MappingProxyType({})


def _claim(
    kind: Kind,
    expects: Outcome,
    source: str = "",
    *,
    settles: str = "",
    before: Before = NEVER,
) -> Callable[[Judge], Claim]:
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
            before=before,
        )

    return claim


symptom = partial(_claim, Kind.SYMPTOM)
"""Return a decorator: the judge becomes a claim about what a user sees."""
mechanism = partial(_claim, Kind.MECHANISM)
"""The same of a claim about why it happens."""
remedy = partial(_claim, Kind.REMEDY)
"""The same of a claim about what helps."""
cost = partial(_claim, Kind.COST)
"""The same of a claim about what it takes."""
