"""How the records of `syncbn_clip` are read: bits and extremes of the buffers at each moment."""

from __future__ import annotations

import math
import struct
from itertools import pairwise
from typing import Any

from harness.errors import MissingRecord
from harness.tables import Tables

BUFFERS = ("running_mean", "running_var")
PHASES = (
    "before_forward",
    "at_layer",
    "after_forward",
    "after_backward",
    "after_step",
    "after_edit",
)
"""Of a training step, in order; `at_layer` is where the buffers reach the norm layer itself."""
SYNC = ("sync_no_clip", "sync_clip_all")
Cell = tuple[int, int]
"""(rank, step)."""


def bits(t: Tables, arm: str, rank: int, step: int, phase: str) -> tuple[Any, ...]:
    """Return what identifies both buffers bit for bit at one moment."""
    return tuple(
        t.value(arm, f"{name}.digest", step=step, phase=phase, rank=rank) for name in BUFFERS
    )


def var(t: Tables, arm: str, rank: int, step: int, phase: str) -> Any:
    """Return running_var as float64 values of exact float32 numbers."""
    return t.snapshot(arm, "running_var", step=step, phase=phase, rank=rank)


def lowest(t: Tables, arm: str, rank: int, step: int, phase: str) -> float:
    """Return the smallest running_var of any channel; a NaN counts as lower than everything."""
    value = float(t.value(arm, "running_var.min", step=step, phase=phase, rank=rank))
    return -math.inf if math.isnan(value) else value


def bound(t: Tables) -> float:
    """Return the clip bound as the buffer's dtype rounds it."""
    (value,) = struct.unpack("<f", struct.pack("<f", t.root_params["clip"]))
    return float(value)


def cells(t: Tables, arm: str) -> list[Cell]:
    """Return every (rank, step) of training.

    Raises:
        MissingRecord: if a rank did not come to its end, or a buffer did not stay finite.
    """
    t.require(arm)
    found = [(rank, step) for rank in t.ranks(arm) for step in range(t.root_params["steps"])]
    for rank, step in found:
        for name in BUFFERS:
            if t.value(arm, f"{name}.nonfinite", step=step, phase="after_forward", rank=rank):
                raise MissingRecord(
                    f"arm {arm}: {name} is not finite after the forward of step {step} on rank "
                    f"{rank}, which says nothing about who writes it; scenario.lr="
                    f"{t.root_params['lr']} or scenario.quiet={t.root_params['quiet']} is too large"
                )
    return found


def changes(t: Tables, *arms: str) -> dict[str, int]:
    """Return for each phase in how many (arm, rank, step) the buffers changed during it."""
    found = dict.fromkeys(PHASES[1:], 0)
    for arm in arms:
        for rank, step in cells(t, arm):
            for before, phase in pairwise(PHASES):
                was, now = (bits(t, arm, rank, step, at) for at in (before, phase))
                found[phase] += was != now
    return found


def in_motion(t: Tables) -> None:
    """Check that the layer, left alone, moves its buffers.

    Raises:
        MissingRecord: if not; then neither stillness nor agreement says anything.
    """
    if not any(changes(t, "sync_no_clip").values()):
        raise MissingRecord(
            f"scenario.momentum={t.root_params['momentum']}: running statistics never move, "
            "whatever is done to them; take a value between 0 and 1"
        )


def edits(t: Tables, arm: str) -> list[Cell]:
    """Return the (rank, step) at which the clip changed running_var and a forward follows.

    Raises:
        MissingRecord: if there is none, or if the layer itself keeps nothing of an edit.
    """
    clip, momentum = t.root_params["clip"], t.root_params["momentum"]
    in_motion(t)
    if momentum == 1.0:
        raise MissingRecord(
            f"scenario.momentum={momentum}: the layer keeps nothing of the old value, so its own "
            "update cannot be told from another writer's; take a value between 0 and 1"
        )
    done, smallest = [], math.inf
    for rank, step in cells(t, arm):
        smallest = min(smallest, lowest(t, arm, rank, step, "after_step"))
        was, now = (bits(t, arm, rank, step, phase) for phase in ("after_step", "after_edit"))
        if was != now and step + 1 < t.root_params["steps"]:
            done.append((rank, step))
    if not done:
        raise MissingRecord(
            f"scenario.clip={clip} edits nothing: running_var is never below {smallest:.3g} in "
            f"arm {arm}; take a bound above that"
        )
    return done


def same_digest(t: Tables, arm: str, metric: str, step: int, phase: str) -> bool:
    """Say whether all ranks of an arm hold the same bits at one moment."""
    found = {
        t.value(arm, f"{metric}.digest", step=step, phase=phase, rank=rank) for rank in t.ranks(arm)
    }
    return len(found) == 1


def counted(t: Tables, arm: str, op: str, phase: str) -> list[int]:
    """Return how many collectives of a kind each rank issued in a phase, in each counted step."""
    return [
        count
        for rank in t.ranks(arm)
        for count in t.series(arm, op, phase=phase, rank=rank).values()
    ]
