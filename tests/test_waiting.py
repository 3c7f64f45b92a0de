"""Giving up is recorded where a wait was in vain, and nowhere else."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from harness import record
from harness.arms import faulty
from harness.plan import Layout
from harness.rank import Rank
from harness.record import Header, Writer
from harness.waiting import gives_up

USUAL_S, SHORT_S = 60.0, 0.5
GLOO = "[unbound_buffer.cc:78] Timed out waiting 500ms for recv operation to complete\nmore"
NCCL = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"


@pytest.fixture
def rank(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=USUAL_S)
    )
    header = Header(run="r", scenario="s", arm="hangs", rank=0, world_size=1)
    writer = Writer(Layout(tmp_path), header)
    yield Rank(
        rank=0,
        local_rank=0,
        world_size=1,
        device="cpu",
        backend="gloo",
        seed=0,
        collective_timeout_s=USUAL_S,
        writer=writer,
    )
    writer.close()
    dist.destroy_process_group()


def hangs(*, isolated):
    return faulty("hangs", "hangs", isolated=isolated)


def raised(tmp_path):
    rows = record.read(Layout(tmp_path), "hangs", 0).rows
    return [row.metrics["raised"] for row in rows if row.phase == "gave up"]


@pytest.mark.parametrize("said", [GLOO, NCCL, "Connection closed by peer [127.0.0.1]:1"])
def test_a_wait_in_vain_is_recorded_and_passed_over(rank, tmp_path, said):
    with gives_up(rank, hangs(isolated=True), SHORT_S):
        raise RuntimeError(said)

    assert raised(tmp_path) == [said.splitlines()[0]]


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("Timed out")])
def test_any_other_error_is_raised(rank, tmp_path, error):
    with pytest.raises(type(error), match=str(error)), gives_up(rank, hangs(isolated=True), 1.0):
        raise error

    assert raised(tmp_path) == []


def test_who_did_not_wait_says_so(rank, tmp_path):
    with gives_up(rank, hangs(isolated=True), SHORT_S):
        pass

    assert raised(tmp_path) == [""]


def test_other_arms_raise_and_record_nothing(rank, tmp_path):
    with pytest.raises(RuntimeError), gives_up(rank, hangs(isolated=False), SHORT_S):
        raise RuntimeError(GLOO)

    assert raised(tmp_path) == []
