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

from harness.watch.evaluation import Evaluated
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
    watcher.presence.world_size, watcher.presence.peers = 2, [0, 1]
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


@pytest.fixture
def looked(monkeypatch):
    seen = []
    monkeypatch.setattr(Watcher, "_at_evaluation", lambda self, one: seen.append(one.what))
    return seen


def test_it_looks_once_an_evaluation_through_the_wrapper(looked, watcher):
    wrapped, x = model(), torch.ones(2, 3)
    wrapped(x)
    assert looked == []
    wrapped.eval()
    wrapped(x)
    wrapped(x)
    assert looked == ["wrapper"]
    wrapped.train()
    wrapped(x)
    wrapped.eval()
    wrapped(x)
    assert looked == ["wrapper"] * 2
    watcher.close()
    wrapped.train()
    wrapped(x)
    wrapped.eval()
    wrapped(x)
    wrapped.module(x)
    assert looked == ["wrapper"] * 2


def test_an_evaluation_of_the_module_inside_is_another_one(looked, watcher):
    wrapped, x = model(), torch.ones(2, 3)
    wrapped.module(x)
    assert looked == []
    wrapped.eval()
    wrapped.module(x)
    assert looked == ["inner"]
    wrapped(x)
    assert looked == ["inner", "wrapper"]


def test_a_module_that_nobody_wraps_counts_from_its_eval_on_and_without_gradients(looked, watcher):
    wrapped, x = model(), torch.ones(2, 3)
    average = torch.optim.swa_utils.AveragedModel(wrapped.module, use_buffers=True)
    with torch.no_grad():
        average(x)
        assert looked == []
        average.eval()
        average(x)
    assert looked == ["other"]
    average(x)
    average.train()
    with torch.no_grad():
        average(x)
    assert looked == ["other"]


def test_parts_of_a_wrapped_module_and_modules_without_buffers_are_not_due(looked, watcher):
    wrapped, plain, x = model(), nn.Linear(3, 3), torch.ones(2, 3)
    with torch.no_grad():
        wrapped.module[1].eval()
        wrapped.module[1](x)
        plain.eval()
        plain(x)
    assert looked == []


def test_a_place_that_evaluates_a_module_has_the_same_stream_on_every_rank(tmp_path, group):
    streams = []
    for rank in range(2):
        watcher = Watcher(folder=str(tmp_path / f"watch{rank}"))
        watcher.presence.world_size, watcher.presence.peers = 2, [0, 1]
        first, other = (nn.BatchNorm1d(3).eval() for _ in range(2))
        with torch.no_grad():
            if rank == 0:
                other(torch.ones(2, 3))
            first(torch.ones(2, 3))
        streams.append(set(watcher._evaluated))
        watcher.close()
    assert len(streams[0]) == 2
    assert streams[1] < streams[0]


def test_an_evaluation_is_looked_at_once_for_as_many_updates():
    one = Evaluated("inner", nn.BatchNorm1d(3), 0, "inner0")
    assert [one.is_due(updates) for updates in (0, 0, 1, 1, 2)] == [True, False, True, False, True]


def test_of_many_evaluations_of_a_teacher_the_later_ones_are_sampled():
    one = Evaluated("other", nn.BatchNorm1d(3), None, "teacher")
    due = [updates for updates in range(1, 65) if one.is_due(updates)]
    assert due == [*range(1, 9), 16, 32, 64]


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
