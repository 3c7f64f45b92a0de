"""One random state in the checkpoint: after the resume all ranks drop the same units.

Ranks are seeded apart, so that dropout masks are independent. Rank 0 writes the checkpoint with its
own state, and the resume gives that to every rank: from there on all masks are rank 0's. The
weights agree as ever, and rank 0 itself goes on exactly as if it had never stopped, so looking at
it finds nothing. Reported in huggingface/transformers#11582 and #17032, NVIDIA-NeMo/Automodel#3437.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import negated, ranks_agree, repeats_records, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/rng_restored_from_rank0.yaml."""

    before: int = field(metadata=at_least(1))
    after: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(8))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train with dropout, stop, resume; what becomes of the random numbers differs."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    random = torch.cuda if rank.device.startswith("cuda") else torch
    first, tanh, last = net(rank)
    layers = nn.Sequential(first, tanh, nn.Dropout(0.5), last)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    dropped: list[torch.Tensor] = []
    layers[2].register_forward_hook(lambda module, inputs, output: dropped.append(output == 0))
    torch.manual_seed(rank.seed + rank.rank)
    for step in range(p.before + p.after):
        if step == p.before and arm["resume"] != "never":
            # The weights come back as they were; rank 0 may have written the file for all.
            saved = [random.get_rng_state()]
            if arm["resume"] == "rank0":
                dist.broadcast_object_list(saved, src=0)
            torch.manual_seed(rank.seed + rank.rank)
            if arm["resume"] != "seeds_again":
                random.set_rng_state(saved[0])
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss)
        rank.digest(step=step, mask=dropped.pop(), weights=weights(model))


def masks(t: Tables, arm: str, steps: range) -> list[list[str]]:
    """Return for each rank the masks of these steps, as digests."""
    t.require(arm)
    return [[t.value(arm, "mask.digest", step=n, rank=r) for n in steps] for r in t.ranks(arm)]


def resumed(t: Tables) -> range:
    """Return the steps behind the resume."""
    return range(t.root_params["before"], t.root_params["before"] + t.root_params["after"])


def goes_on(t: Tables, arm: str) -> Finding:
    """Say whether each rank has all masks and all weights of the run that never stopped."""
    found, due = (masks(t, a, resumed(t)) for a in (arm, "never_stopped"))
    if found == masks(t, "never_stopped", range(len(resumed(t)))):
        return refuted(f"the masks of {arm} after the resume are those of the first steps again")
    if found != due:
        return refuted(f"the masks of {arm} are not those of the run that never stopped")
    return repeats_records(t, arm, "never_stopped", "weights")


@symptom(HOLDS, source="huggingface/transformers#11582")
def masks_are_one(t: Tables) -> Finding:
    """After a resume from rank 0's state all ranks drop the same units, as they did not before."""
    first, *others = masks(t, "from_rank0", resumed(t))
    early = masks(t, "from_rank0", range(t.root_params["before"]))
    apart = all(len(set(step)) == len(early) for step in zip(*early, strict=True))
    same = all(other == first for other in others)
    reason = (
        f"masks are {'apart' if apart else 'shared'} before, {'one' if same else 'apart'} after"
    )
    return (holds if apart and same else refuted)(reason)


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "from_rank0", "weights"))


@symptom(REFUTED)
def rank0_shows_it(t: Tables) -> Finding:
    """One sees it in rank 0's masks, which are not those of the run that never stopped."""
    found, due = (masks(t, arm, resumed(t))[0] for arm in ("from_rank0", "never_stopped"))
    other = sum(mask != right for mask, right in zip(found, due, strict=True))
    return (holds if other else refuted)(f"{other} of {len(due)} masks of rank 0 are other ones")


@remedy(REFUTED, source="huggingface/transformers#17032")
def seed_again(t: Tables) -> Finding:
    """Seeding each rank anew at the resume goes on like the run that never stopped."""
    return goes_on(t, "seeds_again")


@remedy(HOLDS, source="NVIDIA-NeMo/Automodel#3437")
def own_state(t: Tables) -> Finding:
    """With a state for each rank the run goes on as if it had never stopped, to the last bit."""
    return goes_on(t, "own_state")


SCENARIO = Scenario(
    title="One state of the random numbers for all ranks: after a resume they drop the same units",
    family="random numbers",
    cause="rng_restored_from_rank0",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        masks_are_one=("rank 0's state on all ranks makes one mask of N", "masks stay apart"),
        rank0_shows_it=("rank 0 shows it", "rank 0 does not show it"),
        seed_again=("seeding again goes on", "seeding again starts over"),
        own_state=("a state per rank goes on to the last bit", "a state per rank does not go on"),
    ),
    arms=(
        reference("never_stopped", "all ranks, never stopped", resume="never"),
        faulty("from_rank0", "rank 0's state on all ranks", resume="rank0"),
        control("seeds_again", "seeded by rank at the resume", resume="seeds_again"),
        fixed("own_state", "each rank its own state", resume="own"),
    ),
    claims=(masks_are_one, ranks_part, rank0_shows_it, seed_again, own_state),
)
