"""How ranks came to a bad end: which one failed first, where, and how.

When one rank goes, its peers raise or are stopped: those are consequences, and the answer names
the rank that went first.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import record
from harness.errors import RecordError, peer_was_lost
from harness.plan import Layout, Plan

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')
"""As faulthandler writes it, or, with the comma, a traceback."""
LONGEST = 300
"""Characters of a rank's error that fit into a sentence; its log has all of it."""


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """How one rank of one batch ended."""

    rank: int
    code: int | None
    """Exit code; negative = killed by that signal; None = stopped by us while it still ran."""
    arm: str
    """The arm it was in, or had just left."""
    step: int | None
    phase: str
    error: str | None
    """What it raised, from its error file."""
    time: float
    """When it raised, seconds since the epoch; infinite if it left no word."""
    raised_at: str
    """File, line and function of the innermost frame that is not torch's, if it raised."""
    stood: str
    """Where a hung rank stood: file, line and function of its innermost frame."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What became of one batch."""

    arms: Sequence[str]
    command: Sequence[str]
    seconds: float
    exits: Sequence[RankExit] = ()
    """One entry per rank, if any of them failed; empty if all went well."""
    hung: bool = False


def autopsy(
    plan: Plan, layout: Layout, arms: Sequence[str], batch: int, rank: int, code: int | None
) -> RankExit:
    """Gather how one rank of a broken batch ended, from its streams, error file and log."""
    arm, step, phase = arms[0], None, ""
    mine = [(name, dealt.index(rank)) for name, dealt in plan.deal(arms).items() if rank in dealt]
    if mine:
        arm = mine[0][0]
    for name, place in mine:
        try:
            stream = record.read(layout, name, place)
        except RecordError:
            break
        if stream is None:
            continue
        last = stream.rows[-1] if stream.rows else None
        arm, step, phase = name, last.step if last else None, last.phase if last else ""
    error, raised_at, when = _last_words(layout.error(batch, rank))
    return RankExit(
        rank=rank,
        code=code,
        arm=arm,
        step=step,
        phase=phase,
        error=error,
        raised_at=raised_at,
        time=when,
        stood=_stood(layout.log(batch, rank)),
    )


def failures(batches: Sequence[Batch]) -> list[str]:
    """Say in one sentence per broken batch which rank failed first, where, and how."""
    return [_sentence(batch) for batch in batches if batch.exits]


def broken_arm(batch: Batch) -> str:
    """Return the arm in which a broken batch failed."""
    first = _first(batch)
    return (_odd(batch) or first).arm if batch.hung and first.code is None else first.arm


def _sentence(batch: Batch) -> str:
    first = _first(batch)
    if batch.hung and first.code is None:
        return _hang(batch)
    others = len(batch.exits) - 1
    tail = f"; the other {others} were stopped" if others > 1 else ""
    tail = "; the other one was stopped" if others == 1 else tail
    return f"arm {first.arm}: rank {first.rank} {_how(first)} {_place(first)}{tail}"


def _first(batch: Batch) -> RankExit:
    """Return the rank whose end is no consequence of another one's."""

    def order(item: RankExit) -> tuple[int, float, int]:
        if item.code == -signal.SIGTERM:
            # torchrun's agent stops the peers of a failed rank this way.
            kind = 3
        elif item.code is not None and item.code < 0:
            kind = 0
        elif item.code and not (item.error and peer_was_lost(item.error)):
            kind = 1
        elif item.code == 0:
            kind = 2
        else:
            kind = 4 if item.code else 5
        return kind, item.time, item.rank

    gone = [item for item in batch.exits if item.code is not None]
    # A rank that ended well is a culprit only if every other end is a consequence.
    return min(gone or batch.exits, key=order)


def _odd(batch: Batch) -> RankExit | None:
    """Return the hung rank that stands somewhere else than the others; None if none does."""
    places = Counter(item.stood for item in batch.exits if item.stood)

    def oddness(item: RankExit) -> tuple[bool, int, int]:
        return item.stood.startswith("torch/"), places[item.stood], item.rank

    return min((e for e in batch.exits if e.stood), key=oddness) if len(places) > 1 else None


def _hang(batch: Batch) -> str:
    odd = _odd(batch)
    limit = "nothing recorded for the set time limit (launch.arm_timeout_s)"
    places = list(dict.fromkeys(item.stood for item in batch.exits if item.stood))
    if odd is None:
        behind = min(batch.exits, key=lambda item: -1 if item.step is None else item.step)
        where = f"; all ranks stand at {places[0]}" if places else ""
        return (
            f"arm {behind.arm}: {limit}{where}; furthest behind is rank {behind.rank} "
            f"{_place(behind)}; stacks are in logs/"
        )
    others = []
    for place in places:
        ranks = [str(item.rank) for item in batch.exits if item.stood == place != odd.stood]
        if len(ranks) == 1:
            others.append(f"rank {ranks[0]} waits at {place}")
        elif ranks:
            others.append(f"ranks {', '.join(ranks)} wait at {place}")
    return (
        f"arm {odd.arm}: {limit}; rank {odd.rank} {_place(odd)} stands at {odd.stood}, "
        f"while {', '.join(others)}"
    )


def _how(item: RankExit) -> str:
    if item.code is not None and item.code < 0:
        return f"was killed by signal {-item.code} ({_signal_name(-item.code)})"
    if item.code == 0:
        return "left with code 0 before its arm was through"
    if item.error:
        text = " ".join(item.error.split())
        text = text if len(text) <= LONGEST else text[:LONGEST] + " ..."
        return f"raised {text}" + (f" at {item.raised_at}" if item.raised_at else "")
    return f"exited with code {item.code}"


def _place(item: RankExit) -> str:
    if item.step is None:
        return "before its first record"
    return f"after step {item.step}" + (f", phase {item.phase}" if item.phase else "")


def _last_words(path: Path) -> tuple[str | None, str, float]:
    """Return what an error file says, where it was raised, and when, to the nanosecond.

    torchrun's own time stamp has whole seconds, too coarse to tell who was first.
    """
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        when = path.stat().st_mtime
    except (OSError, ValueError, KeyError):
        return None, "", math.inf
    if not isinstance(message, dict):
        return str(message), "", when
    stack = str(message.get("extraInfo", {}).get("py_callstack", ""))
    frames = [frame for frame in FRAME.finditer(stack) if "torch" not in Path(frame["file"]).parts]
    return str(message["message"]), _shown(frames[-1]) if frames else "", when


def _stood(log: Path) -> str:
    """Return the innermost frame of the last stack a rank wrote, or an empty text."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    _, mark, stack = text.rpartition("Current thread")
    frame = FRAME.search(stack) if mark else None
    return _shown(frame) if frame else ""


def _shown(frame: re.Match[str]) -> str:
    parts = Path(frame["file"]).parts
    where = "/".join(parts[parts.index("torch") :]) if "torch" in parts else parts[-1]
    return f"{where}:{frame['line']} in {frame['function']}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown signal"
