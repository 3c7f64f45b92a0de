"""Two forward passes, one backward: buffers written in between break the first pass's graph.

A discriminator sees real and generated rows in a pass each, and one backward goes through both.
The first pass has kept its batch norm's running statistics. Averaging them over the ranks before
every pass writes into what is kept: "modified by an inplace operation", with several ranks only.
DDP's own broadcast counted as a write, too, up to torch 2.11. pytorch/pytorch#22095.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, negated, ranks_agree, repeats_records, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted, unknown
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/buffer_inplace.yaml."""

    steps: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(4))
    lr: float = field(metadata=at_least(1e-6))


def check(p: Params, ranks: int) -> list[str]:
    """Batch norm needs two rows on every rank."""
    one = f"scenario.batch={p.batch} leaves a rank one row; type scenario.batch={2 * ranks}"
    return [one] if p.batch < 2 * ranks else equal_shares(p, ranks)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a discriminator; who sends its buffers around, and before which pass, is different."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from harness.collectives import count_collectives
    from scenarios._models import FEATURES, gradients, mlp, rows

    norm: Any = nn.BatchNorm1d(12, dtype=torch.float64)
    first = mlp((FEATURES, 12), generator=rank.generator("first"))
    last = mlp((12, 1), generator=rank.generator("last"))
    net = nn.Sequential(first, norm, nn.Tanh(), last).to(rank.device)
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=arm["buffers"] == "sent")
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    real, fake = (rows(rank, p.batch, name=name)[0] for name in ("real", "fake"))
    passes = [torch.cat([real, fake])] if arm["joined"] else [real, fake]
    wanted = torch.cat([torch.ones_like(real[:, :1]), torch.zeros_like(fake[:, :1])])
    for step in range(p.steps):
        optimizer.zero_grad()
        scores = []
        for number, batch in enumerate(passes):
            if arm["buffers"] == "averaged" or (arm["buffers"] == "once" and number == 0):
                with torch.no_grad():
                    for value in (norm.running_mean, norm.running_var):
                        dist.all_reduce(value)
                        value /= rank.world_size
            written = -norm.running_mean._version
            with count_collectives() as calls:
                scores.append(model(batch))
            written += norm.running_mean._version
        rank.log(step=step, error="", sent=calls.count("broadcast"), written=written)
        try:
            (torch.cat(scores) - wanted).square().mean().backward()
        except RuntimeError as error:
            rank.log(step=step, error=str(error).partition(": [")[0])
            return
        optimizer.step()
        rank.snapshot(step=step, gradients=gradients(model))


def raises(t: Tables, arm: str) -> Finding:
    """Say whether backward complains on every rank."""
    t.require(arm)
    said = [t.last(arm, "error", rank=rank) for rank in t.ranks(arm)]
    stopped = sum("modified by an inplace operation" in error for error in said)
    reason = f"{arm}: backward raises on {stopped} of {len(said)} ranks: {said[0] or 'nothing'}"
    return (holds if stopped == len(said) else refuted)(reason, effect=float(stopped), unit="ranks")


@symptom(HOLDS, source="takuseno/d3rlpy#439")
def averaged_raises(t: Tables) -> Finding:
    """With buffers averaged by hand before each of two passes backward raises on every rank."""
    return raises(t, "averaged")


@symptom(REFUTED, source="pytorch/pytorch#175024", before={"2.12": HOLDS})
def sent_raises(t: Tables) -> Finding:
    """With the broadcast that DDP makes in each of two passes backward raises."""
    return raises(t, "default")


@mechanism(REFUTED, source="pytorch/pytorch#22095", before={"2.12": HOLDS})
def is_a_write(t: Tables) -> Finding:
    """The broadcast in the second pass counts as a write into buffers that the first has kept."""
    if not t.last("default", "sent"):
        return unknown("DDP sends no buffers in the second pass: nothing was to be seen")
    return negated(counts(t, "default", "written", 0, "writes into running_mean in that pass"))


@symptom(REFUTED)
def wrong_gradients(t: Tables) -> Finding:
    """The gradients come out wrong instead, without a word."""
    told = raises(t, "default")
    raised = told.outcome is HOLDS
    return negated(told if raised else repeats_records(t, "default", "not_sent", "gradients"))


@remedy(HOLDS)
def once_a_step(t: Tables) -> Finding:
    """Averaged before the first pass only, backward ends; the gradients are the same."""
    return all_of(negated(raises(t, "once")), repeats_records(t, "once", "not_sent", "gradients"))


@remedy(HOLDS)
def one_pass(t: Tables) -> Finding:
    """With one pass over both halves backward ends, and the ranks agree."""
    return all_of(negated(raises(t, "joined")), ranks_agree(t, "joined", "gradients"))


SCENARIO = Scenario(
    title="Two forward passes, one backward: buffers averaged in between break the first graph",
    family="buffers",
    cause="buffer_written_before_backward",
    params=Params,
    run=run,
    check=check,
    headline=says(
        averaged_raises=("averaging buffers before each pass raises", "averaging does not raise"),
        sent_raises=("so does DDP's broadcast", "DDP's broadcast does not"),
        wrong_gradients=("but gradients are wrong", "no gradient is wrong"),
    ),
    arms=(
        reference("not_sent", "broadcast_buffers=False", buffers="not_sent", joined=False),
        control("default", "DDP as it is", buffers="sent", joined=False),
        faulty("averaged", "averaged before each pass", buffers="averaged", joined=False),
        fixed("once", "averaged before the first pass", buffers="once", joined=False),
        fixed("joined", "one pass over both", buffers="averaged", joined=True),
    ),
    claims=(averaged_raises, sent_raises, is_a_write, wrong_gradients, once_a_step, one_pass),
)
