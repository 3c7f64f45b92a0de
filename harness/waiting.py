"""Let a rank that waits in vain give up soon and say so, instead of hanging for half an hour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.scenario import Arm


@contextmanager
def gives_up(rank: Rank, arm: Arm, seconds: float) -> Iterator[None]:
    """In an isolated arm, let collectives whose peers never come raise after `seconds`.

    What this rank raises is recorded as `raised` in phase "gave up" ("" if nothing), and it goes
    on behind the region. There the ranks meet, through the store: nobody's process ends while
    another one waits, which would cut the wait short. Other arms keep the time limit of the run.
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
        raised = str(error).partition("\n")[0] or type(error).__name__
    rank.log(step=0, phase="gave up", raised=raised)
    store = dist.PrefixStore("gave up", dist.distributed_c10d._get_default_store())
    if store.add("through", 1) == rank.world_size:
        store.set("all", "through")
    store.wait(["all"], usual)
