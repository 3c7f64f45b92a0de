"""The hook on a wrapper: what is left of it in copies, and when it looks."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from harness.watch.watcher import Watcher


@pytest.fixture
def group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def watcher(tmp_path, group):
    watcher = Watcher(folder=str(tmp_path / "watch"))
    watcher.meet()
    # As if there were another rank, which has not written anything.
    watcher.world_size, watcher.peers = 2, [0, 1]
    yield watcher
    watcher.close()


def model():
    return DDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def test_copies_and_pickles_hold_nothing_of_the_watcher(watcher, tmp_path):
    wrapped = model()
    assert all(hooks_of(wrapped))
    twin = copy.deepcopy(wrapped.eval())
    twin(torch.ones(2, 3))
    twin.train()(torch.ones(2, 3))
    assert watcher.context.window.take(0, 0) == {}
    assert not list(tmp_path.glob("watch/attempt0-*/module*"))
    raw = io.BytesIO()
    torch.save(twin.module, raw)
    torch.save(wrapped._forward_hooks, tmp_path / "hooks.pt")
    # Where there is no watcher, and nothing else of this project.
    program = "import torch; hooks = torch.load('hooks.pt', weights_only=False).values()\n"
    program += "assert hooks and all(hook(1, 2, 3) is None for hook in hooks)\n"
    program += "import sys; assert 'harness' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=True,
        timeout=60,
    )


def test_it_looks_once_an_evaluation_and_only_through_the_wrapper(watcher, monkeypatch):
    looked = []
    monkeypatch.setattr(Watcher, "_at_evaluation", lambda self, one: looked.append(one))
    wrapped, x = model(), torch.ones(2, 3)
    wrapped(x)
    assert looked == []
    wrapped.eval()
    wrapped.module(x)
    assert looked == []
    wrapped(x)
    wrapped(x)
    assert len(looked) == 1
    wrapped.train()
    wrapped(x)
    wrapped.eval()
    wrapped(x)
    assert len(looked) == 2
    watcher.close()
    wrapped.train()
    wrapped(x)
    wrapped.eval()
    wrapped(x)
    assert len(looked) == 2


def test_a_wrapper_made_before_is_watched_once(group, tmp_path):
    wrapped = model()
    watcher = Watcher(folder=str(tmp_path / "watch"))
    assert not wrapped._forward_hooks
    watcher.modules.add(wrapped)
    once = hooks_of(wrapped)
    assert all(once)
    watcher.modules.add(wrapped)
    assert hooks_of(wrapped) == once
    watcher.close()
    assert hooks_of(wrapped) == [0, 0, 0]


def hooks_of(wrapped):
    inner = wrapped.module
    return [
        len(hooks)
        for hooks in (wrapped._forward_hooks, wrapped._forward_pre_hooks, inner._forward_pre_hooks)
    ]
