"""Let a rank that waits in vain give up soon and say so, instead of hanging for half an hour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from harness.errors import peer_was_lost

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.scenario import Arm

IN_VAIN = ("timed out", "timeout", "timed-out")
"""What gloo and NCCL say, in small letters, when a collective's peers have not come."""


@contextmanager
def gives_up(rank: Rank, arm: Arm, seconds: float) -> Iterator[None]:
    """In an isolated arm, let collectives whose peers never come raise after `seconds`.

    The error is recorded as `raised` in phase "gave up" ("" if there was none), and the rank goes
    on behind the region; an error of another kind is raised. Behind the region the ranks meet,
    through the store: nobody's process ends while another one still waits, which would cut its
    wait short. Arms that are not isolated keep the time limit of the run.
    """
    import torch.distributed as dist

    if not arm.isolated:
        yield
        return
    group = dist.distributed_c10d._get_default_group()
    usual = timedelta(seconds=rank.collective_timeout_s)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    raised = ""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if not (peer_was_lost(said) or any(sign in said.lower() for sign in IN_VAIN)):
            raise
        raised = said.partition("\n")[0]
    rank.log(step=0, phase="gave up", raised=raised)
    store = dist.PrefixStore("gave up", dist.distributed_c10d._get_default_store())
    if store.add("through", 1) == rank.world_size:
        store.set("all", "through")
    store.wait(["all"], usual)
