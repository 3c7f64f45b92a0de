"""Loader workers that augment alike: it is the generator kept in the data set, not the global one.

Every worker is a copy of the process that made the loader. torch seeds its own, Python's and
numpy's global random state anew in each worker and epoch, so that these differ. A generator object
that the data set holds is copied as it stands: all workers draw the same, in every epoch again.
The advice to seed from torch.initial_seed() in __getitem__ is worse: that number is one for the
whole life of a worker: all its samples get one augmentation. See also pytorch/pytorch#5059.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    import numpy as np

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/worker_seed.yaml."""

    samples: int = field(metadata=at_least(5))
    workers: int = field(metadata=between(2, 4))


@dataclass
class Crops:
    """A data set whose samples are the places at which an augmentation would crop."""

    draws_from: str
    kept: np.random.Generator

    def __getitem__(self, index: int) -> tuple[int, float]:
        """Return the sample's number and its place; where that is drawn from differs."""
        import numpy as np
        import torch

        if self.draws_from == "torch":
            return index, torch.rand((), dtype=torch.float64).item()
        if self.draws_from == "numpy":
            return index, np.random.rand()
        if self.draws_from == "initial_seed":
            return index, np.random.default_rng(torch.initial_seed()).random()
        return index, self.kept.random()


def once_a_worker(worker: int) -> None:
    """Give this worker's copy of the data set a generator of its own."""
    import numpy as np
    import torch

    info: Any = torch.utils.data.get_worker_info()
    info.dataset.kept = np.random.default_rng(info.seed)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Go through the data set twice."""
    import numpy as np
    import torch
    from torch.utils.data import DataLoader

    if arm["draws_from"] == "manual_seed":
        try:
            torch.Generator().manual_seed()  # type: ignore[call-arg]
        except TypeError as error:
            rank.log(step=0, raised=type(error).__name__)
        return
    data: Any = Crops(arm["draws_from"], np.random.default_rng(0))
    # fork is how a script on Linux starts workers, up to Python 3.13; the others copy as well.
    how: Any = {"num_workers": p.workers, "multiprocessing_context": "fork"}
    how |= {"worker_init_fn": once_a_worker} if arm.get("init") else {}
    loader = DataLoader[Any](data, sampler=range(p.samples), **how)
    for epoch in range(2):
        for index, place in loader:
            rank.log(step=epoch * p.samples + int(index), place=place)


def distinct(t: Tables, arm: str, expected: int | None = None) -> Finding:
    """Decide: two epochs have so many different draws, by default one for each sample."""
    t.require(arm)
    samples = t.root_params["samples"]
    place = [t.value(arm, "place", step=step) for step in range(2 * samples)]
    found = len(set(place))
    reason = f"{arm}: {found} different draws for {samples} samples in two epochs"
    said = holds if found == (expected or 2 * samples) else refuted
    return said(reason, effect=float(found), unit="different draws")


@symptom(REFUTED, "pytorch/pytorch#5059", settles="B18")
def workers_draw_alike(t: Tables) -> Finding:
    """Workers inherit one random state: all make the same augmentations."""
    return negated(all_of(distinct(t, "torch"), distinct(t, "numpy")))


@mechanism(HOLDS, settles="B18")
def object_is_copied(t: Tables) -> Finding:
    """A generator kept in the data set is copied to the workers: they draw the same, each epoch."""
    return distinct(t, "kept", -(-t.root_params["samples"] // t.root_params["workers"]))


@remedy(REFUTED, settles="B19")
def seed_in_getitem(t: Tables) -> Finding:
    """Seeding from torch.initial_seed() in __getitem__ gives samples draws of their own."""
    return distinct(t, "initial_seed")


@remedy(REFUTED, settles="B19")
def manual_seed_bare(t: Tables) -> Finding:
    """torch.Generator().manual_seed(), without a value, does it as well."""
    t.require("manual_seed")
    return refuted(f"it raises {t.last('manual_seed', 'raised')}")


@remedy(HOLDS)
def init_function(t: Tables) -> Finding:
    """A generator made once for each worker, in worker_init_fn, gives samples their own draws."""
    return distinct(t, "init_fn")


SCENARIO = Scenario(
    title="Loader workers that augment alike: a generator kept in the data set is copied",
    family="random numbers",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    differs=("Crops", "once_a_worker", "run"),
    headline=says(
        workers_draw_alike=("workers share one random state", "global random states differ"),
        object_is_copied=("a generator kept in the data set does not", "kept ones as well"),
    ),
    arms=(
        reference("torch", "torch.rand", ranks=1, draws_from="torch"),
        reference("numpy", "np.random.rand", ranks=1, draws_from="numpy"),
        faulty("kept", "default_rng() in __init__", ranks=1, draws_from="kept"),
        faulty("initial_seed", "seeded in __getitem__", ranks=1, draws_from="initial_seed"),
        faulty("manual_seed", "manual_seed()", ranks=1, draws_from="manual_seed"),
        fixed("init_fn", "made in worker_init_fn", ranks=1, draws_from="kept", init=True),
    ),
    claims=(workers_draw_alike, object_is_copied, seed_in_getitem, manual_seed_bare, init_function),
)
