"""How a watched run ends: the last rank to finish gives the answer, and nobody waits for it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.causes import Diagnosis, Strength, diagnose
from harness.causes.by_hand import averages_by_hand
from harness.plural import number_of
from harness.watch.answers.answer import Answer
from harness.watch.answers.damage import Damage, spread
from harness.watch.answers.gathering import gather
from harness.watch.answers.outputs import Outputs, publish
from harness.watch.answers.per_rank import RankTable, per_rank
from harness.watch.audit.summary import audit_notes
from harness.watch.divergence import Divergence, divergence, from_json, rank_local
from harness.watch.evidence import Evidence
from harness.watch.exit_codes import FAULT_FOUND, NOT_OBSERVED, NOTHING_FOUND, STOPPED
from harness.watch.hangs.stopping import calls_table, exit_code, has_stopped, symptom
from harness.watch.meeting.folder import Folder
from harness.watch.naming import ranks
from harness.watch.stderr import say
from harness.watch.watcher import Watcher

BEGIN_S = 2.0
"""Seconds in which a rank that this one has trained with must have begun to be watched."""

REPORTED_NEXT = "torchrun reports it next as a failure, with a traceback of its own"


def close(
    watcher: Watcher,
    *,
    script_code: int,
    quiet: bool,
    outputs: Outputs | None = None,
    error: BaseException | None = None,
) -> int:
    """Write down how the script ended on this rank, answer if it is the last, return exit code.

    The code is the script's own wherever that is not 0.
    """
    ending: list[str] = []
    try:
        given = answer(watcher, script_code=script_code, error=error)
        if given is not None:
            ending = publish(given, outputs or Outputs())
    except Exception as error:
        say(f"the watcher could not give its answer: {type(error).__name__}: {error}")
        return script_code or NOT_OBSERVED
    if given is None:
        if script_code:
            # The launcher ends all ranks as soon as one has failed, also the one that answers.
            watcher.stall.wait_for_answer()
        elif watcher.whereabouts is not None:
            return watcher.whereabouts.answered()
        return script_code
    if not quiet or given.exit_code:
        if given.exit_code and _is_reported(watcher):
            ending.append(f"  exit     {given.exit_code}; {REPORTED_NEXT}")
        say("\n".join([*given.lines(), *ending]))
    if watcher.folder is not None and watcher.folder.root.exists():
        # Also where nothing was found: the witness would take the run for one that was cut short.
        watcher.folder.claim("said")
    return script_code or given.exit_code


def answer(
    watcher: Watcher, *, script_code: int, error: BaseException | None = None
) -> Answer | None:
    """Stop watching and write down how the script ended; return the answer on the last rank.

    Args:
        watcher: the watcher of this rank.
        script_code: the exit code of the script.
        error: what the script raised, if that is how it ended.

    Raises:
        OSError: the folder cannot be written.
    """
    watcher.close()
    watcher.meet()
    folder = watcher.folder
    assert folder is not None
    watcher.journal.flush()
    mine = {
        "code": script_code,
        **watcher.account(),
        **watcher.stall.ended(error),
    }
    folder.write(folder.end(watcher.rank), mine)
    if script_code and not isinstance(error, KeyboardInterrupt):
        watcher.stall.ask_others()
    ends = {rank: folder.read(folder.end(rank)) for rank in watcher.peers}
    missing = [rank for rank, end in ends.items() if end is None]
    elsewhere = watcher.whereabouts
    if missing and not script_code and elsewhere is None and _never_began(watcher, missing):
        folder.claim("said")
        return _not_all_watched(missing) if folder.claim("answered") else None
    if (missing and not script_code) or not folder.claim("answered"):
        if elsewhere is not None:
            elsewhere.serve()
        return None
    if elsewhere is not None:
        if not elsewhere.hand_over(failed=script_code != 0):
            folder.claim("said")
            # Ranks of this place that have not ended have still to write there.
            if not missing and _is_temporary(folder) and not folder.found_across.exists():
                shutil.rmtree(folder.root, ignore_errors=True)
            return None
        ends = {rank: folder.read(folder.end(rank)) for rank in watcher.peers}
        ends[watcher.rank]["notes"] = watcher.notes
        missing = [rank for rank in range(watcher.world_size) if ends.get(rank) is None]
        if len(watcher.peers) < watcher.world_size and not script_code:
            missing = []
    found = _first_found(watcher)
    given = _answer(watcher, {r: end for r, end in ends.items() if end}, missing, found)
    if elsewhere is not None:
        elsewhere.tell(given.exit_code)
    if given.exit_code == NOTHING_FOUND and not missing and _is_temporary(folder):
        shutil.rmtree(folder.root, ignore_errors=True)
    return given


def _is_reported(watcher: Watcher) -> bool:
    """Say whether torchrun is about to report the code of the answer, and not one of the script."""
    folder = watcher.folder
    if folder is None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    ends = (folder.read(folder.end(rank)) for rank in watcher.peers)
    return not any(end and end["code"] for end in ends)


def _never_began(watcher: Watcher, missing: Sequence[int]) -> bool:
    """Say whether ranks that have not ended do not even run under the watcher, as nobody will."""
    folder = watcher.folder
    assert folder is not None
    if not any(one["updates"] for one in watcher.updates.summary()):
        # Without an update this rank may have been over before the others began.
        return False
    deadline = time.monotonic() + BEGIN_S
    while not any(folder.start(rank).exists() for rank in missing):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def _not_all_watched(strangers: Sequence[int]) -> Answer:
    return Answer(
        exit_code=NOT_OBSERVED,
        first=f"could not observe: {ranks(strangers)} did not run under the watcher; start every "
        "rank with `-m harness.watch`, or call `attach(model)` on every rank",
    )


def _is_temporary(folder: Folder) -> bool:
    return folder.root.name.startswith("watch-")


def _answer(
    watcher: Watcher,
    ends: dict[int, Any],
    missing: list[int],
    found: tuple[str, Divergence] | None,
) -> Answer:
    assert watcher.folder is not None
    notes = list(dict.fromkeys(note for end in ends.values() for note in end["notes"]))
    notes += [f"rank {r} stopped watching: {e['failed']}" for r, e in ends.items() if e["failed"]]
    if missing:
        notes.append(f"{ranks(missing)} had not ended when this was written")
    codes = {rank: end["code"] for rank, end in ends.items() if end["code"]}
    notes += [f"the script ended with exit code {c} on rank {r}" for r, c in codes.items()]
    source, what = found or ("", None)
    evidence = gather(
        watcher.folder, watcher.peers, watcher.world_size, divergence=what, source=source
    )
    on_purpose = averages_by_hand(evidence)
    if on_purpose is not None:
        what, evidence = None, replace(evidence, divergence=None, source="")
    diagnoses = tuple(diagnose(evidence))
    notes += audit_notes(evidence)
    if what is not None or any(one.strength > Strength.FACT for one in diagnoses):
        return Answer(
            exit_code=exit_code(evidence, diagnoses, FAULT_FOUND),
            first="",
            divergence=what,
            source=source,
            diagnoses=diagnoses,
            notes=tuple(notes),
            kept=str(watcher.folder.root),
            table=_table(evidence, diagnoses),
            damage=_damage(watcher, evidence),
            calls=calls_table(evidence) if has_stopped(evidence) else None,
        )
    halted = symptom(evidence)
    if halted is not None:
        return Answer(
            exit_code=STOPPED,
            first=halted,
            diagnoses=diagnoses,
            notes=tuple(notes),
            kept=str(watcher.folder.root),
            calls=calls_table(evidence),
        )
    code, first = _nothing_found(watcher, ends, notes)
    if on_purpose is not None and code == NOTHING_FOUND:
        first = f"nothing found: {on_purpose}"
    return Answer(exit_code=code, first=first, diagnoses=diagnoses, notes=tuple(notes))


def _table(evidence: Evidence, diagnoses: Sequence[Diagnosis]) -> RankTable | None:
    if evidence.divergence is not None:
        if evidence.optimizer is None:
            return None
        return per_rank(evidence, optimizer=evidence.optimizer, update=evidence.divergence.step)
    step = next((one.step for one in diagnoses if one.step is not None), None)
    return None if step is None else per_rank(evidence, optimizer=0, update=step)


def _damage(watcher: Watcher, evidence: Evidence) -> Damage | None:
    if evidence.divergence is None or evidence.optimizer is None:
        return None
    made = [
        end["optimizers"][evidence.optimizer]["updates"]
        for end in evidence.ends.values()
        if evidence.optimizer < len(end["optimizers"])
    ]
    last = max(made, default=evidence.divergence.step + 1) - 1
    return spread(watcher.updates.exchange_of(evidence.optimizer).look, evidence.divergence, last)


def _nothing_found(watcher: Watcher, ends: dict[int, Any], notes: list[str]) -> tuple[int, str]:
    """Say what was found equal, and what was not compared because it is not replicated."""
    if watcher.world_size == 1:
        return NOTHING_FOUND, "one process: there is no replica to compare"
    if watcher.peers == [watcher.rank]:
        return NOT_OBSERVED, "could not observe: no other rank could be compared with this one"
    seen = [one for end in ends.values() for one in end["optimizers"]]
    failed = [f"rank {rank} stopped watching" for rank, end in ends.items() if end["failed"]]
    if not seen or failed:
        return NOT_OBSERVED, "could not observe: " + (
            "no optimizer made a step" if not seen else failed[0]
        )
    first_rank = next(iter(ends.values()))["optimizers"]
    local: list[str] = []
    for number, _ in enumerate(first_rank):
        local += sorted(rank_local(watcher.updates.exchange_of(number).look))
    parts = sum(one["sharded"] for one in first_rank)
    # Where each rank has layers of its own, no rank has all the names.
    whole = max(0, sum(one["parameters"] for one in first_rank) - parts - len(local))
    if local:
        shown = ", ".join(local[:3]) + (", ..." if len(local) > 3 else "")
        notes.append(
            f"{len(local)} parameters were not compared ({shown}): before the first "
            "update they differed between ranks, and so did their gradients"
        )
    if parts:
        notes.append(f"{parts} parameters are sharded: parts were not compared")
    if not whole and local:
        return NOT_OBSERVED, "could not observe: no parameter is replicated"
    counts = sorted({sum(o["updates"] for o in end["optimizers"]) for end in ends.values()})
    updates = ("" if len(counts) == 1 else f"{counts[0]} to ") + number_of(counts[-1], "update")
    held = number_of(whole, "replicated parameter")
    if parts and not whole:
        held = f"{number_of(parts, 'sharded parameter')} and no replicated one"
    return NOTHING_FOUND, f"no divergence: {held}, {updates}, {number_of(len(ends), 'rank')}"


def _first_found(watcher: Watcher) -> tuple[str, Divergence] | None:
    """Return the earliest divergence that any rank has found, or that only shows at the end."""
    assert watcher.folder is not None
    all_found = []
    for rank in watcher.peers:
        content = watcher.folder.read(watcher.folder.finding(rank))
        if content is not None:
            found = from_json(content["found"])
            all_found.append((content["source"], found))
    across = watcher.folder.read(watcher.folder.found_across)
    if across is not None:
        all_found.append((across["source"], from_json(across["found"])))
    if not all_found:
        all_found = _left_over(watcher)
    # Of two views on the same difference, the one of more ranks.
    first = min(all_found, key=lambda one: (one[1].order, -len(one[1].ranks), one[0]), default=None)
    return first if first is None else _among_all(watcher, *first)


def _among_all(watcher: Watcher, source: str, found: Divergence) -> tuple[str, Divergence]:
    """Look again, with the ranks of other places, at what those of one place have found."""
    words = source.split()
    if watcher.whereabouts is not None and words[0] == "optimizer":
        look = watcher.updates.exchange_of(int(words[1])).look
        place = int(found.order)
        for index in (place, place + 1):
            # What began with gradients shows in the parameters after them.
            again = divergence(look, index)
            if again and again.order == found.order and len(again.ranks) > len(found.ranks):
                return source, again
    return source, found


def _left_over(watcher: Watcher) -> list[tuple[str, Divergence]]:
    """Compare what was not compared as it was written.

    Fewer ranks than all have reached it, or ranks of several places, which came to an end first.
    """
    found = []
    for number, one in enumerate(watcher.updates.summary()):
        exchange = watcher.updates.exchange_of(number)
        last = 2 * one["updates"] + 1
        for index in range(max(0, last - 64), last + 1):
            seen = exchange.look(index)
            if len(seen) > 1 and (len(seen) < len(watcher.peers) or watcher.whereabouts):
                what = divergence(exchange.look, index)
                if what is not None:
                    found.append((f"optimizer {number} ({one['kind']})", what))
                    break
    return found
