"""A process group that does not come about: what is missing is named at once, who is missing not.

`init_process_group` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and raises a ValueError
that names the first one it does not find. An address alone, in the environment or as tcp://...,
says nothing of who this process is. What it does wait for, half an hour by default, is other
processes: too few of them, or nobody at that address. Reported in pytorch/pytorch#49846, #52848,
#63874 and #81704 (a port that is taken).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/init_rendezvous.yaml."""

    patience_s: float = field(metadata=at_least(0.1))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Start a process group from this process alone; what it is told differs."""
    import os
    import socket
    from datetime import timedelta
    from unittest import mock

    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()  # The launcher's own, of this process alone.
    with mock.patch.dict(os.environ), socket.socket() as other_job:
        other_job.bind(("127.0.0.1", 0))
        port = other_job.getsockname()[1]
        if arm.get("port") == "taken":
            other_job.listen()
        else:
            other_job.close()
        who = {"RANK": arm.get("rank", 0), "WORLD_SIZE": arm.get("world", 1)}
        values = who | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name in (*values, "TORCHELASTIC_USE_AGENT_STORE"):
            os.environ.pop(name, None)
        os.environ.update({name: str(values[name]) for name in arm.get("sets", "").split()})
        given: dict[str, Any] = {"init_method": f"tcp://127.0.0.1:{port}"} if arm.get("url") else {}
        if arm.get("url") == "and who":
            given |= {"rank": 0, "world_size": 1}
        if arm.get("world") == 2:
            given["timeout"] = timedelta(seconds=p.patience_s)
        raised, said = "", ""
        try:
            dist.init_process_group("gloo", **given)
        except (ValueError, RuntimeError) as error:
            raised, said = type(error).__name__, str(error).partition("\n")[0]
    rank.log(step=0, raised=raised, said=said)


def ends_in(t: Tables, arm: str, raised: str, *words: str) -> Finding:
    """Decide: the arm raises an error of that class, whose message has these words."""
    t.require(arm)
    found, said = t.last(arm, "raised"), t.last(arm, "said")
    reason = f"{arm}: {found}: {said}" if found else f"{arm}: the group is there"
    right = found == raised and all(word in said for word in words)
    return (holds if right else refuted)(reason, evidence={"raised": found, "said": said})


def comes_up(t: Tables, *arms: str) -> Finding:
    """Decide: the process group comes about in all of these arms."""
    return all_of(*(ends_in(t, arm, "") for arm in arms))


@symptom(REFUTED, source="pytorch/pytorch#49846", settles="B68")
def missing_hangs(t: Tables) -> Finding:
    """Without MASTER_ADDR init_process_group hangs, and says nothing."""
    rank = ends_in(t, "no_environment", "ValueError", "variable RANK expected, but not set")
    address = ends_in(t, "no_address", "ValueError", "variable MASTER_ADDR expected, but not set")
    return negated(all_of(rank, address))


@symptom(HOLDS, source="pytorch/pytorch#52848", settles="B68")
def waits_for_peers(t: Tables) -> Finding:
    """What it waits for, until the timeout, is peers: too few of them, or nobody at the address."""
    too_few = ends_in(t, "too_few", "DistStoreError", "Timed out", "1/2 clients joined")
    return all_of(too_few, ends_in(t, "nobody", "DistNetworkError", "timed out"))


@symptom(HOLDS, source="pytorch/pytorch#81704")
def taken_is_said(t: Tables) -> Finding:
    """A port that another job has is an error at once, which says so."""
    return ends_in(t, "port_taken", "DistNetworkError", "EADDRINUSE")


@remedy(REFUTED, source="pytorch/pytorch#63874", settles="B68")
def address_only(t: Tables) -> Finding:
    """Setting MASTER_ADDR and MASTER_PORT is enough."""
    return comes_up(t, "address_only")


@remedy(REFUTED, settles="B69")
def url_only(t: Tables) -> Finding:
    """init_method="tcp://127.0.0.1:23456" is enough, without any of the variables."""
    return comes_up(t, "url_only")


@remedy(HOLDS)
def url_and_rank(t: Tables) -> Finding:
    """It is together with rank and world_size, as the four variables are, set by torchrun."""
    return comes_up(t, "url_rank", "complete")


WHO, WHERE = "RANK WORLD_SIZE", "MASTER_ADDR MASTER_PORT"
ALL = f"{WHO} {WHERE}"
SCENARIO = Scenario(
    title="No process group: a variable that is missing is named at once, a peer is waited for",
    family="rendezvous",
    cause="rank_not_in_environment",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        missing_hangs=("a missing variable hangs", "a missing variable is an error at once"),
        waits_for_peers=("missing peers are waited for", "missing peers are noticed at once"),
        url_only=("an address is enough", "an address does not say who one is"),
    ),
    arms=(
        reference("complete", "all four variables", ranks=1, sets=ALL),
        faulty("no_environment", "started with plain python", ranks=1),
        faulty("no_address", WHO, ranks=1, sets=WHO),
        faulty("address_only", WHERE, ranks=1, sets=WHERE),
        faulty("too_few", "WORLD_SIZE=2, one is started", ranks=1, sets=ALL, world=2),
        faulty("nobody", "rank 1, and no rank 0", ranks=1, sets=ALL, world=2, rank=1),
        faulty("port_taken", "another job listens there", ranks=1, sets=ALL, port="taken"),
        faulty("url_only", "init_method=tcp://...", ranks=1, url="only"),
        fixed("url_rank", "tcp://..., rank and world_size", ranks=1, url="and who"),
    ),
    claims=(missing_hangs, waits_for_peers, taken_is_said, address_only, url_only, url_and_rank),
)
