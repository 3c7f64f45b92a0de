"""Loader workers: how many there are changes no sample, and the warning counts one process alone.

Which samples make a batch is decided by the sampler in the main process; workers only fetch, and
batches come back in order: num_workers=0 is slow at most. "Cores less one" is meant for one
process: N ranks on a machine start N times as many, and DataLoader's warning of too many, which
looks at its own process, says nothing. From two sections of an article.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, symptom
from harness.findings import negated, repeats_records, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted, unknown

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/loader_workers.yaml."""

    rows: int = field(metadata=at_least(8))
    batch: int = field(metadata=at_least(1))
    workers: int = field(metadata=between(1, 4))
    epochs: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    ranks: int = field(metadata=at_least(2))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train from a shuffled loader; how many workers it has is what differs."""
    import os
    import warnings

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from scenarios._models import net, rows, weights

    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    how: dict[str, Any] = {"num_workers": 0}
    if arm["workers"] == "some":
        how = {"num_workers": p.workers, "multiprocessing_context": "fork"}
    elif arm["workers"] == "cores_less_one":
        how = {"num_workers": max(1, cores - 1)}
    elif arm["workers"] == "all_of_the_ranks":
        how = {"num_workers": max(1, cores - 1) * p.ranks}
    data = TensorDataset(*rows(rank, p.rows, whole=True))
    shuffle = rank.generator("order")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loader = DataLoader(data, p.batch, shuffle=True, generator=shuffle, **how)
    rank.log(step=0, phase="made", warnings=len(warned), workers=how["num_workers"], cores=cores)
    if arm["workers"] in ("cores_less_one", "all_of_the_ranks"):
        return
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    step = 0
    for _ in range(p.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            rank.snapshot(step=step, inputs=inputs, weights=weights(model))
            step += 1


@symptom(REFUTED, settles="B01")
def none_spoils_results(t: Tables) -> Finding:
    """num_workers=0 spoils results: the training is another than with workers."""
    return negated(repeats_records(t, "none", "some", "weights"))


@mechanism(HOLDS, settles="~B01")
def same_batches(t: Tables) -> Finding:
    """The batches are the same, in the same order, with workers and without."""
    return repeats_records(t, "none", "some", "inputs")


def made(t: Tables, arm: str, what: str) -> int:
    """Return what an arm recorded when its loader was made."""
    t.require(arm)
    return int(t.value(arm, what, step=0, phase="made"))


@mechanism(REFUTED)
def warning_counts_ranks(t: Tables) -> Finding:
    """Where all ranks together have more workers than cores, DataLoader warns."""
    ranks, cores = t.root_params["ranks"], made(t, "cores_less_one", "cores")
    own, warned = (made(t, "cores_less_one", what) for what in ("workers", "warnings"))
    if own > cores or own * ranks <= cores:
        return unknown(f"{ranks} ranks do not fill {cores} cores; type a larger scenario.ranks")
    reason = f"{ranks} ranks with {own} each are {ranks * own} on {cores} cores: {warned} warnings"
    return (holds if warned else refuted)(reason, effect=float(warned), unit="warnings")


@mechanism(HOLDS)
def warning_counts_process(t: Tables) -> Finding:
    """It does warn of as many in one process."""
    workers, warned = (made(t, "all_of_the_ranks", what) for what in ("workers", "warnings"))
    reason = f"{workers} workers of one process: {warned} warnings"
    return (holds if warned else refuted)(reason, effect=float(warned), unit="warnings")


SCENARIO = Scenario(
    title="Loader workers change no sample; the warning of too many counts one process alone",
    family="data",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        none_spoils_results=("without workers the results are others", "workers change no result"),
        warning_counts_ranks=("the warning counts all ranks", "the warning counts one process"),
    ),
    arms=(
        reference("some", "workers", ranks=1, workers="some"),
        control("none", "num_workers=0", ranks=1, workers="none"),
        control("cores_less_one", "cores - 1, each rank", ranks=1, workers="cores_less_one"),
        control("all_of_the_ranks", "all in one", ranks=1, workers="all_of_the_ranks"),
    ),
    claims=(none_spoils_results, same_batches, warning_counts_ranks, warning_counts_process),
)
