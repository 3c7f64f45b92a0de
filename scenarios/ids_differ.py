"""Labels numbered in the order of a set: class 3 is another label on every rank.

Python salts the hash of strings anew in each process, and a set of them has another order in each.
Ranks that number labels by it train one classifier on targets that contradict each other. Weights
are equal on all ranks, no number is out of range, and the loss stays high. Seeding does not reach
the salt. Reported in sktime/pytorch-forecasting#2293.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/ids_differ.yaml."""

    labels: int = field(metadata=at_least(6))
    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a classifier; the order in which labels get their numbers is all that differs."""
    import subprocess
    import sys

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import FEATURES, mlp, weights

    def order_of_a_set(labels: list[str]) -> list[str]:
        # Ranks that torchrun starts have a salt each; those of this harness may be forked from one
        # process, so that the set is built in a process of its own.
        salt = 0 if arm["numbers"] == "salt" else rank.seed * 1000 + rank.rank + 1
        seeds = "random.seed(0); " if arm["numbers"] == "seeds" else ""
        program = f"import random, sys; {seeds}print(*set(sys.argv[1:]))"
        asked = [sys.executable, "-S", "-c", program, *labels]
        environment = {"PYTHONHASHSEED": str(salt % 2**32)}
        ended = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
        return ended.stdout.split()

    names = [f"label{n}" for n in range(p.labels)]
    vocabulary = sorted(names) if arm["numbers"] == "sorted" else order_of_a_set(names)
    index = {label: number for number, label in enumerate(vocabulary)}
    draw = rank.generator("rows")
    which = torch.randint(p.labels, (p.batch,), generator=draw)
    centres = 2.0 * torch.randn(p.labels, FEATURES, generator=draw, dtype=torch.float64)
    x = centres[which] + 0.1 * torch.randn(p.batch, FEATURES, generator=draw).double()
    targets = torch.tensor([index[names[n]] for n in which])
    mine = rank.shard(rank.permutation(p.batch, name="rows"))
    mine_x, mine_y = x[mine].to(rank.device), targets[mine].to(rank.device)
    layers = mlp((FEATURES, 24, p.labels), generator=rank.generator("net")).to(rank.device)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    rank.log(step=0, phase="numbered", index=" ".join(vocabulary))
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(mine_x), mine_y)
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, weights=weights(model))
    right = (layers(x.to(rank.device)).argmax(1).cpu() == targets).double().mean()
    rank.log(step=p.steps, phase="end", right=right)


def learns(t: Tables, arm: str) -> Finding:
    """Say whether every rank finds, by its own numbers, as many labels as one process does."""
    t.require(arm, "one_process")
    due = t.last("one_process", "right")
    found = [t.last(arm, "right", rank=rank) for rank in t.ranks(arm)]
    share = " ".join(f"{100 * part:.0f}" for part in found)
    reason = f"{arm}: ranks find {share} % of the labels, one process {100 * due:.0f} %"
    return (holds if min(found) >= 0.9 * due else refuted)(reason, effect=due - min(found))


@symptom(HOLDS, source="sktime/pytorch-forecasting#2293")
def numbers_differ(t: Tables) -> Finding:
    """Numbered in the order of a set, a label has another number on every rank."""
    return negated(ranks_agree(t, "from_set", "index", moving=False))


@symptom(HOLDS)
def fits_less(t: Tables) -> Finding:
    """The ranks then find fewer labels than one process after as many updates."""
    return negated(learns(t, "from_set"))


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "from_set", "weights"))


@remedy(REFUTED)
def seed_it(t: Tables) -> Finding:
    """random.seed(0) on all ranks gives the set one order."""
    return ranks_agree(t, "seeded", "index", moving=False)


@remedy(HOLDS)
def sort_it(t: Tables) -> Finding:
    """Numbering sorted labels trains like one process."""
    agree = ranks_agree(t, "sorted", "index", moving=False)
    return all_of(like_one_process(t, "sorted"), agree, learns(t, "sorted"))


@remedy(HOLDS)
def fix_the_salt(t: Tables) -> Finding:
    """PYTHONHASHSEED=0 for all ranks gives them one order, and they learn as one process does."""
    return all_of(ranks_agree(t, "one_salt", "index", moving=False), learns(t, "one_salt"))


SCENARIO = Scenario(
    title="Labels numbered in the order of a set: every rank means another label by class 3",
    family="data",
    cause="ids_differ",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        numbers_differ=("every rank numbers the labels otherwise", "labels have one number"),
        fits_less=("less is learned", "as much is learned"),
        seed_it=("seeding helps", "seeding does not help"),
    ),
    arms=(
        one_process("one process, sorted", numbers="sorted"),
        faulty("from_set", "enumerate(set(labels))", numbers="set"),
        faulty("seeded", "random.seed(0) before", numbers="seeds"),
        fixed("sorted", "enumerate(sorted(labels))", numbers="sorted"),
        fixed("one_salt", "PYTHONHASHSEED=0", numbers="salt"),
    ),
    claims=(numbers_differ, fits_less, ranks_part, seed_it, sort_it, fix_the_salt),
)
