"""Two lines in a script instead of another command: `attach(model, optimizer)`."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys

import torch

from harness.watch.answers.closing import close
from harness.watch.audit.auditor import Auditor
from harness.watch.watcher import WATCHERS, Watcher


def attach(
    model: torch.nn.Module,
    *more: torch.nn.Module | torch.optim.Optimizer,
    folder: str | None = None,
    quiet: bool = False,
    audit_every: int | None = None,
    whole: bool = False,
) -> Watcher:
    """Watch from here on; call it on every rank, after the model and its optimizer are made.

    Every optimizer of the process is observed. At exit the last rank prints the answer on stderr;
    the exit code stays the script's own.

    Args:
        model: the model, wrapped or not.
        more: further models; optimizers are accepted and need not be named.
        folder: one that all hosts share; the default is a temporary one of this host.
        quiet: say something only if something is wrong.
        audit_every: audit every n-th update, the first one included: replay it in one process and
            compare the gradients.
        whole: read large tensors whole at every update, so that a difference in one element of
            them is dated to its step.

    Raises:
        ValueError: audit_every is less than 1.
    """
    if audit_every is not None and audit_every < 1:
        raise ValueError(f"audit_every is {audit_every}; it must be 1 or more, such as 50")
    models = [model, *(one for one in more if isinstance(one, torch.nn.Module))]
    process = os.getpid()
    if process in WATCHERS:
        WATCHERS[process].modules.add(*models)
        return WATCHERS[process]
    watcher = WATCHERS[process] = Watcher(folder=folder, whole=whole)
    if audit_every is not None:
        watcher.updates.auditor = Auditor(watcher.context, audit_every)
    watcher.modules.add(*models)

    def at_exit() -> None:
        if os.getpid() == process:
            # Python keeps here what it has printed a traceback of.
            error = getattr(sys, "last_value", None)
            close(watcher, script_code=0 if error is None else 1, quiet=quiet, error=error)

    if multiprocessing.parent_process() is None:
        atexit.register(at_exit)
    else:
        # A spawned process ends without running what is registered with atexit.
        multiprocessing.util.Finalize(None, at_exit, exitpriority=-100)
    return watcher
