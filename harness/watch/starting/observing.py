"""Begins to watch this process, as it was typed; torch must have been imported by now."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from harness.watch.starting.options import Options

if TYPE_CHECKING:
    from harness.watch.watcher import Watcher


def begin(options: Options) -> Watcher:
    """Return the watcher of this process, which observes from here on.

    Raises:
        Exception: whatever may go wrong; the caller says so and lets the script run.
    """
    from harness.watch.watcher import WATCHERS, Watcher

    watcher = WATCHERS[os.getpid()] = Watcher(
        folder=options.folder,
        hang_timeout=options.hang_timeout,
        unequal=options.unequal,
        whole=options.whole,
    )
    watcher.stall.outputs = options.outputs
    if options.audit_every is not None:
        from harness.watch.audit.auditor import Auditor

        watcher.updates.auditor = Auditor(watcher.context, options.audit_every)
    if options.record or options.nudge is not None:
        from harness.watch.twin.recorder import Nudge, Recorder

        if options.record:
            watcher.updates.recorder = Recorder(options.record, watcher.context)
        if options.nudge is not None:
            Nudge(options.nudge)
    return watcher
