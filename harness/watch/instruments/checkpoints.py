"""What is loaded from checkpoints: a state that was there and went nowhere."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches
from harness.watch.modules import parameters_of

MOST = 16
_DEPTH = 3
_OPTIMIZER = frozenset({"state", "param_groups"})
_COUNTED = ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step")
_SCHEDULE = frozenset({"last_epoch", "_step_count"})


class Checkpoints:
    """Observes `torch.load` and `load_state_dict` of modules and optimizers."""

    def __init__(self, context: Context) -> None:
        """Put functions around torch's own."""
        self._context = context
        self._patches = Patches()
        self._saved: list[dict[str, Any]] = []
        """Optimizer states that came out of files, as far as they are compared."""
        self._restored: list[weakref.ref[Optimizer]] = []
        self._schedules: list[tuple[dict[str, Any], int]] = []
        """Of the schedules that came out of files: how they are set, and their steps."""
        self._schedulers: list[weakref.ref[Any]] = []
        self._schedules_restored: list[weakref.ref[Any]] = []
        self._modules = 0
        self._at: str | None = None
        safely, around = context.safely, self._patches.around
        around(torch, "load", after=safely("checkpoints", self._read))
        around(Optimizer, "load_state_dict", after=safely("checkpoints", self._optimizer_loaded))
        around(torch.nn.Module, "load_state_dict", after=safely("checkpoints", self._module_loaded))
        base, loaded = lr_scheduler.LRScheduler, safely("checkpoints", self._schedule_loaded)
        around(base, "__init__", after=safely("checkpoints", self._scheduler_made))
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and issubclass(kind, base):
                around(kind, "load_state_dict", after=loaded)

    def close(self) -> None:
        """Put torch's own functions back."""
        self._patches.close()

    def before_update(self, number: int, optimizer: Optimizer, update: int) -> None:
        """At the first update of an optimizer, see whether a state that fits it was left out."""
        if update or not self._saved or not self._modules:
            return
        restored = [one for reference in self._restored if (one := reference()) is not None]
        held = set(map(id, parameters_of(optimizer)))
        event: dict[str, Any] = {"optimizer": number, "class": type(optimizer).__name__}
        if any(one is optimizer for one in restored):
            self._context.journal.write("resumed", **event)
            self._look_at_schedules(number, optimizer)
            return
        for one in restored:
            if any(id(p) in held for p in parameters_of(one)):
                event["loaded_into_another"] = type(one).__name__
        mine = _about(optimizer.state_dict())
        fits = [one for one in self._saved if one["settings"] == mine["settings"]]
        if fits and not mine["entries"]:
            event |= {"entries": fits[-1]["entries"], "model_loaded_at": self._at}
            self._context.journal.write("not_resumed", **event)

    def _read(self, content: Any, *_: Any, **__: Any) -> None:
        for state in _states(content, _DEPTH, _OPTIMIZER):
            if state["state"] and len(self._saved) < MOST:
                self._saved.append(_about(state))
        for state in _states(content, _DEPTH, _SCHEDULE):
            if len(self._schedules) < MOST:
                self._schedules.append((_set(state), int(state["last_epoch"])))

    def _look_at_schedules(self, number: int, optimizer: Optimizer) -> None:
        """Note a schedule that begins anew below an optimizer that does not."""
        restored = [one() for one in self._schedules_restored]
        for reference in self._schedulers:
            scheduler = reference()
            if scheduler is None or scheduler.optimizer is not optimizer:
                continue
            if scheduler.last_epoch > 0 or any(one is scheduler for one in restored):
                return
            # Another length or rate is another schedule, and meant.
            mine = _set(scheduler.state_dict())
            steps = [steps for saved, steps in self._schedules if saved == mine and steps > 0]
            if steps:
                self._context.journal.write(
                    "schedule_not_resumed",
                    optimizer=number,
                    steps=steps[-1],
                    model_loaded_at=self._at,
                    **{"class": type(scheduler).__name__},
                )
                return

    def _scheduler_made(self, _: None, scheduler: Any, *__: Any, **___: Any) -> None:
        if len(self._schedulers) < MOST:
            self._schedulers.append(weakref.ref(scheduler))

    def _schedule_loaded(self, _: None, scheduler: Any, *__: Any, **___: Any) -> None:
        if len(self._schedules_restored) < MOST:
            self._schedules_restored.append(weakref.ref(scheduler))

    def _optimizer_loaded(self, _: None, optimizer: Optimizer, *__: Any, **___: Any) -> None:
        if len(self._restored) < MOST:
            self._restored.append(weakref.ref(optimizer))

    def _module_loaded(self, result: Any, module: Any, *__: Any, **___: Any) -> None:
        # What gets a part of the weights only begins something new, as with a head of its own.
        if self._saved and not getattr(result, "missing_keys", ()):
            self._modules += 1
            self._at = call_site()


def _states(content: Any, depth: int, keys: frozenset[str]) -> list[dict[str, Any]]:
    """Return the dictionaries with these keys in what was loaded."""
    if isinstance(content, dict):
        if keys <= content.keys():
            return [content]
        parts = list(content.values())
    elif isinstance(content, list | tuple):
        parts = list(content)
    else:
        return []
    return [found for p in parts[:64] for found in _states(p, depth - 1, keys)] if depth else []


def _set(schedule: dict[str, Any]) -> dict[str, Any]:
    """Return how a schedule is set, without what it counts."""
    return {
        key: value if isinstance(value, int | float | str | list | tuple) else type(value).__name__
        for key, value in schedule.items()
        if key not in _COUNTED
    }


def _about(state: dict[str, Any]) -> dict[str, Any]:
    """Return what two optimizers have in common if one goes on where the other stopped."""
    settings = [
        {
            # A schedule changes the rate, and keeps the one it began with.
            "lr": _number(group.get("initial_lr", group.get("lr"))),
            "names": sorted(k for k in group if k not in ("initial_lr", "param_names")),
            "parameters": len(group["params"]),
        }
        for group in state["param_groups"]
    ]
    return {"settings": settings, "entries": len(state["state"])}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
