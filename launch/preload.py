"""What the fork server imports once, so that its ranks do not: torch and what it loads lazily.

`torch._dynamo` costs as much again as torch itself, and every DDP constructor and every optimizer
pulls it in at first use.
"""

# ruff: noqa: E402 (the collector has to be off before the imports it would slow down)
from __future__ import annotations

import atexit
import gc
import os
import signal
import sys

# Nothing is left to be done at the end of the server, and what torch 2.15 brings along would write
# dozens of lines about what it has not given back.
if "multiprocessing.forkserver" in sys.modules:
    atexit.register(os._exit, 0)

# Ctrl-C reaches the server too. While it imports, it ends without a word: the launcher has one.
_interrupted = signal.getsignal(signal.SIGINT)
if _interrupted is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Importing makes no garbage worth collecting, and the passes over it cost a quarter of the time.
gc.disable()

import torch
import torch._dynamo
import torch.distributed.elastic.multiprocessing.errors
import torch.distributed.fsdp
import torch.nn.parallel
import torch.profiler

import launch.rank

__all__ = ["launch", "torch"]

# What is loaded by now lives as long as the server: ranks must not copy its pages to scan them.
gc.collect()
gc.freeze()
gc.enable()
# A rank that has only just been forked ends without a word, too: `launch.rank.child` takes over.
