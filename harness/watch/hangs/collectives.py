"""The collectives of this rank, from the recorder that torch itself keeps of them.

Nothing is patched for it. Since torch 2.13 the recorder is on by itself and knows gloo; before,
TORCH_FR_BUFFER_SIZE turns it on where it exists.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

MOST = 2000
"""Calls that are kept; torch's recorder keeps as many by itself."""
DEEP = 8
"""Frames of the user's that are kept of each call."""
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).resolve().parents[1])
_DISTRIBUTED = str(Path(_TORCH) / "distributed")
_OUTSIDE = (_TORCH, _OWN, "<frozen ", "<string>")
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
}


class Collectives:
    """Reads torch's recorders; what came before it was made is left out."""

    def __init__(self) -> None:
        """Find the recorders, and remember how far they are."""
        self._dumps = _recorders()
        self._groups: dict[str, tuple[int, ...]] = {}
        self._first = [
            max((entry["record_id"] for entry in _load(dump, True, False)["entries"]), default=-1)
            + 1
            for dump in self._dumps
        ]

    @property
    def known(self) -> bool:
        """Whether this torch keeps a record at all."""
        return bool(self._dumps)

    def progress(self) -> str:
        """Return something that changes when a collective is called or is over; costs 20 us."""
        return json.dumps([_load(dump, False, False).get("pg_status", {}) for dump in self._dumps])

    def remember_groups(self) -> None:
        """Note which ranks are in which group, which torch forgets when groups are destroyed."""
        world = getattr(torch.distributed.distributed_c10d, "_world", None)
        if world is None:
            return
        for group, name in dict(world.pg_names).items():
            ranks = world.pg_group_ranks.get(group)
            if ranks:
                self._groups[str(name)] = tuple(sorted(ranks))

    def waits(self) -> float | None:
        """Return the time limit, in seconds, of the oldest call that is not over, if any."""
        for dump, first in zip(self._dumps, self._first, strict=True):
            for entry in _load(dump, True, False)["entries"]:
                if entry["record_id"] >= first and not _is_over(entry):
                    return float(entry.get("timeout_ms") or 0) / 1e3
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the last calls, as `harness.watch.hangs.pairing` reads them."""
        self.remember_groups()
        chains: dict[tuple[tuple[str, int, str], ...], int] = {}
        calls: list[list[Any]] = []
        for dump, first in zip(self._dumps, self._first, strict=True):
            lives: dict[str, list[int]] = {}
            for entry in _load(dump, True, True)["entries"]:
                if entry["record_id"] < first or entry.get("is_p2p"):
                    continue
                chain = _chain(entry.get("frames", ()))
                backend, _, operation = entry["profiling_name"].partition(":")
                name = entry["process_group"][0]
                # A group that is made again after destroy_process_group has the same name.
                known = lives.setdefault(name, [])
                if entry["pg_id"] not in known:
                    known.append(entry["pg_id"])
                life = known.index(entry["pg_id"])
                calls.append(
                    [
                        f"{name}#{life}" if life else name,
                        entry["collective_seq_id"],
                        operation or backend,
                        entry["input_sizes"],
                        [_DTYPES.get(dtype, dtype.lower()) for dtype in entry["input_dtypes"]],
                        chains.setdefault(chain, len(chains)),
                        _is_over(entry),
                        entry["time_created_ns"] / 1e9,
                        backend,
                    ]
                )
        return {
            "groups": {name: list(ranks) for name, ranks in self._groups.items()},
            "chains": [list(chain) for chain in chains],
            "calls": calls[-MOST:],
        }


def stack_of(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Return the user's frames of a thread, the innermost first."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < DEEP:
        code = frame.f_code
        if not _is_outside(code.co_filename):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return found


def stack_of_error(error: BaseException) -> list[tuple[str, int, str]]:
    """Return the user's frames through which an error came, the innermost first."""
    found: list[tuple[str, int, str]] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_outside(code.co_filename):
            found.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return found[::-1][:DEEP]


def place_of(thread: int) -> tuple[Any, ...]:
    """Return something that changes when a thread goes on, however little."""
    frame, place = sys._current_frames().get(thread), []
    while frame is not None:
        place.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(place)


def _is_outside(name: str) -> bool:
    return name.startswith(_OUTSIDE)


def _chain(frames: Any) -> tuple[tuple[str, int, str], ...]:
    return tuple(
        (frame["filename"], int(frame["line"]), frame["name"])
        for frame in frames
        if not _is_outside(frame["filename"])
    )[:DEEP]


def _is_over(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _recorders() -> list[Callable[..., bytes]]:
    c10d = getattr(torch._C, "_distributed_c10d", None)
    found: list[Callable[..., bytes]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(c10d, name, None)
        # Of another torch it may be there and take other arguments.
        with contextlib.suppress(Exception):
            _load(dump, True, False)
            if callable(dump):
                found.append(dump)
    return found


def _load(dump: Any, calls: bool, stacks: bool) -> dict[str, Any]:
    content = pickle.loads(  # noqa: S301  torch's own, from this very process
        dump(includeCollectives=calls, includeStackTraces=stacks, onlyActive=False)
    )
    content.setdefault("entries", [])
    return dict(content)


def waits_in_torch(frame: FrameType | None) -> bool:
    """Say whether a thread is in a function of torch.distributed."""
    while frame is not None and _is_outside(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_DISTRIBUTED):
            return True
        frame = frame.f_back
    return False
