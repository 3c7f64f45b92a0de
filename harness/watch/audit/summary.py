"""What the audits of a run have shown, in sentences for the end of an answer. No torch here."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from harness.watch.evidence import Evidence
from harness.watch.journal import Event


def audit_notes(evidence: Evidence) -> list[str]:
    """Return sentences on what was audited, what could not be, and what it cost."""
    events = list(evidence.events("audit"))
    costs = list(evidence.events("audit cost"))
    if not costs:
        return []
    notes = [_compared(events)] if any(e["could_not"] is None for e in events) else []
    failed: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["could_not"]:
            failed[event["could_not"]].append(event)
    for reason, among in failed.items():
        notes.append(f"replay audit: {_updates(among)} could not be audited: {reason}")
    started = {(e["optimizer"], e["update"]) for e in costs}
    open_ = started - {(e["optimizer"], e["update"]) for e in events}
    if open_:
        notes.append(f"replay audit: {len(open_)} updates were not made by all ranks")
    return [*notes, _cost(costs)]


def _compared(events: list[Event]) -> str:
    done = [event for event in events if event["could_not"] is None]
    worst = max(max(e["synchronised"]["residual"], e["synchronised"]["spread"]) for e in done)
    replays = min(event["replays"] for event in done)
    first = done[0]
    said = (
        f"replay audit: {_updates(done)}; the synchronised gradient is the mean of what the "
        f"ranks' losses ask for to {worst:.2g} rounding floors (a floor is {first['floor']:.1g} of "
        f"a gradient's norm, from {replays} replays)"
    )
    factors = [e["factor"] for e in done if e["factor"] is not None and _equal(e)]
    if factors:
        low, high = min(factors), max(factors)
        shown = f"{low:.4g}" if high - low < 1e-3 * abs(high) else f"{low:.4g} to {high:.4g}"
        said += f"; it is {shown} times that of one process"
    unknown = next((e["weighting_unknown"] for e in done if e["weighting_unknown"]), None)
    if unknown:
        said += f"; how ranks are weighted is not known: {unknown}"
    whole = [event["at_once"] for event in done if event["at_once"] is not None]
    apart = [one for one in whole if one["fault"]]
    if apart:
        name, _, residual, floor = apart[0]["tensors"][0]
        said += (
            "; rows have an influence on each other"
            + (", as in batch norm" if any(event["batch_norm"] for event in done) else "")
            + f": with all rows in one batch the gradient of {name} is {residual:.2g} of its norm "
            f"away, {residual / floor:.2g} floors, which is no fault"
        )
    elif whole:
        said += "; one forward pass over the rows of all ranks gives the same"
    return said


def _equal(event: Event) -> bool:
    return all(loss["weighting"] == "equal" for loss in event["losses"])


def _updates(events: list[Event]) -> str:
    updates: dict[int, list[int]] = defaultdict(list)
    for event in events:
        updates[event["optimizer"]].append(event["update"])
    parts: list[str] = []
    for number, mine in sorted(updates.items()):
        some = ", ".join(map(str, sorted(mine)[:4])) + (", ..." if len(mine) > 4 else "")
        of = f" of optimizer {number}" if len(updates) > 1 or number else ""
        parts.append(f"{'update' if len(mine) == 1 else 'updates'} {some}{of}")
    return " and ".join(parts)


def _cost(costs: list[Event]) -> str:
    slowest: dict[tuple[Any, ...], float] = defaultdict(float)
    for event in costs:
        place = (event["optimizer"], event["update"])
        slowest[place] = max(slowest[place], event["milliseconds"])
    total = sum(slowest.values())
    share = total / 1000 / max(event["elapsed"] for event in costs)
    return (
        f"replay audit: {len(slowest)} audits took {total / len(slowest):.3g} ms each, "
        f"{100 * share:.2g} % of the time until the last one"
    )
