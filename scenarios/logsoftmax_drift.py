"""4 GPUs end apart from one: not log_softmax, but a mean taken where valid labels are uneven.

The report blames an implicit mask in the gradient of log_softmax and the order of the all-reduce.
There is no mask (the gradient is softmax minus one-hot), and the order moves the last bit only.
What moves training is the divisor: `F.cross_entropy` divides by the valid labels of its own rank,
DDP then averages over ranks, and a mean of means is no mean where the counts differ. Class weights
and soft Dice have the same fault. Dividing by the count of all ranks brings the gap to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from harness.scenario import (
    Arm,
    Claim,
    Finding,
    Kind,
    Outcome,
    Plot,
    Role,
    Scenario,
    at_least,
    between,
)
from scenarios._logsoftmax_drift import alone, judges
from scenarios._logsoftmax_drift.judges import DTYPES, dice_of, marks

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank

IGNORE = -100
FEATURES = 8
SHARES = (0.55, 0.2, 0.15, 0.1)
"""Of the classes; the first is background and does not count in Dice."""
WEIGHTS = (0.3, 1.0, 1.5, 2.5)
HELD_OUT = 960
"""Rows on which Dice is measured; the same in every arm."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/logsoftmax_drift.yaml."""

    imbalance: float = field(metadata=between(0.0, 0.75))
    steps: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(8))
    lr: float = field(metadata=at_least(0.0))
    hidden: int = field(metadata=at_least(1))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Every rank needs a row of each half of the batch."""
    if p.batch >= 2 * ranks:
        return []
    return [
        f"scenario.batch={p.batch} leaves some of {ranks} ranks without a row; "
        f"type scenario.batch={2 * ranks} or more"
    ]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train on the same rows in every arm; one process gets them all, N ranks a share each."""
    if arm["loss"] == "alone":
        return alone.run(rank)

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import mlp

    dtype = torch.float64 if arm["dtype"] == "float64" else torch.float32
    model = mlp((FEATURES, p.hidden, len(SHARES)), generator=rank.generator("weights"))
    model.to(rank.device, dtype)
    ddp = DistributedDataParallel(model) if rank.world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    features, labels = batches(rank, p, dtype)
    held_out = pixels(rank, "held out", HELD_OUT, dtype)
    order = order_of(rank, arm, p)
    amp = torch.autocast(
        rank.device.partition(":")[0], torch.bfloat16, enabled=arm["dtype"] == "bfloat16"
    )
    for step in range(1, p.steps + 1):
        x, y = rank.shard(features[step - 1][order]), rank.shard(labels[step - 1][order])
        optimizer.zero_grad()
        with amp:
            logits = ddp(x)
            loss = loss_of(arm, logits, y, rank.world_size)
        loss.backward()
        rank.log(step=step, phase="backward", loss=loss)  # of every repeat: its floor
        if rank.repeat == 0:
            computed = str(logits.dtype).removeprefix("torch.")
            rank.log(step=step, phase="backward", valid=(y != IGNORE).sum(), logits=computed)
            keep(rank, "grad", [q.grad for q in model.parameters()], step, "backward", p)
        optimizer.step()
        keep(rank, "params", list(model.parameters()), step, "step", p)
        if step == p.steps or (rank.repeat == 0 and step in marks(p.steps)):
            score(rank, model, *held_out, step)


def loss_of(arm: Arm, logits: torch.Tensor, y: torch.Tensor, world: int) -> torch.Tensor:
    """The branch in which the arms differ: how the loss is written, and what divides its sum."""
    import torch
    import torch.nn.functional as F

    valid = y != IGNORE
    divisor = valid.sum()
    everywhere = arm["divisor"] == "all ranks"
    reduction = "sum" if everywhere else "mean"  # mean: over the valid labels of this rank
    if arm["loss"] == "cross_entropy":
        loss = F.cross_entropy(logits, y, reduction=reduction)
    elif arm["loss"] == "log_softmax":
        loss = F.nll_loss(F.log_softmax(logits, 1), y, reduction=reduction)
    elif arm["loss"] == "log_of_softmax":
        loss = F.nll_loss(torch.log(torch.softmax(logits, 1)), y, reduction=reduction)
    elif arm["loss"] == "soft":
        loss = F.cross_entropy(logits[valid], soften(y[valid], logits), reduction=reduction)
    elif arm["loss"] == "soft_rows":  # rows without a label have an all-zero target, and count
        loss = F.cross_entropy(logits, soften(y.clamp(min=0), logits) * valid[:, None])
    elif arm["loss"] == "class_weights":
        weight = logits.new_tensor(WEIGHTS)
        loss = F.cross_entropy(logits, y, weight=weight, reduction=reduction)
        divisor = weight[y[valid]].sum()
    else:
        chance, truth = torch.softmax(logits[valid], 1), F.one_hot(y[valid], len(SHARES))
        overlap, size = (chance * truth).sum(0), (chance + truth).sum(0)
        if everywhere:
            overlap, size = summed(overlap, world), summed(size, world)
        return 1 - (2 * overlap / size).mean()
    return loss * world / summed(divisor) if everywhere else loss


def summed(mine: torch.Tensor, weight: int = 1) -> torch.Tensor:
    """Return the sum over ranks; its gradient is `weight` times that of this rank's own part."""
    import torch.distributed as dist

    total = mine.detach().clone()
    dist.all_reduce(total)
    own = mine * weight
    return own + (total - own.detach())


def valid_counts(valid: int, world: int, imbalance: float) -> list[int]:
    """Return how many of `valid` labels each rank gets: a ramp of (1 + x) to (1 - x) means."""
    last = world - 1
    slope = [1 + imbalance * (last - 2 * rank) / max(last, 1) for rank in range(world)]
    edges = [round(part * valid / world) for part in accumulate(slope, initial=0.0)]
    return [high - low for low, high in pairwise(edges)]


def deal(batch: int, counts: Sequence[int]) -> list[int]:
    """Return an order of the rows in which every len(counts)-th row is one rank's.

    The first half of the batch carries labels. Every deal holds the same rows, so one process on
    the global batch is the reference of all of them.
    """
    labelled, ignored = list(range(batch // 2)), list(range(batch // 2, batch))
    order = [0] * batch
    for rank, count in enumerate(counts):
        for number, place in enumerate(range(rank, batch, len(counts))):
            takes_label = labelled and (number < count or not ignored)
            order[place] = (labelled if takes_label else ignored).pop()
    return order


def order_of(rank: Rank, arm: Arm, p: Params) -> torch.Tensor:
    """Return which row stands where: dealt out to N ranks, or one process's permutation."""
    import torch

    if rank.world_size == 1:
        return rank.permutation(p.batch)
    imbalance = p.imbalance if arm["counts"] == "uneven" else 0.0
    return torch.tensor(deal(p.batch, valid_counts(p.batch // 2, rank.world_size, imbalance)))


def soften(y: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return class probabilities instead of class numbers: 0.85 for the label, 0.05 for others."""
    import torch.nn.functional as F

    return 0.8 * F.one_hot(y, len(SHARES)).to(logits.dtype) + 0.2 / len(SHARES)


def pixels(
    rank: Rank, name: str, count: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features (count, FEATURES) and class numbers: one noisy cluster a class."""
    import torch

    draw = rank.generator(name)
    y = torch.multinomial(torch.tensor(SHARES), count, replacement=True, generator=draw)
    centres = torch.randn(
        len(SHARES), FEATURES, generator=rank.generator("centres"), dtype=torch.float64
    )
    x = centres[y] + torch.randn(count, FEATURES, generator=draw, dtype=torch.float64)
    return x.to(rank.device, dtype), y.to(rank.device)


def batches(rank: Rank, p: Params, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features (steps, batch, FEATURES) and labels; half of each batch is ignored."""
    x, y = pixels(rank, "training", p.steps * p.batch, dtype)
    y = y.reshape(p.steps, p.batch)
    y[:, p.batch // 2 :] = IGNORE
    return x.reshape(p.steps, p.batch, FEATURES), y


def keep(rank: Rank, name: str, tensors: Sequence[Any], step: int, phase: str, p: Params) -> None:
    """Record all values at the marks, a digest at the other steps of the unpermuted run."""
    import torch

    if step not in marks(p.steps) and rank.repeat:
        return
    vector = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    record = rank.snapshot if step in marks(p.steps) else rank.digest
    record(step=step, phase=phase, **{name: vector})


def score(rank: Rank, model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    """Record Dice on the held-out rows: of all of them, and of this rank's share alone."""
    import torch
    import torch.nn.functional as F

    with torch.no_grad():
        chance = torch.softmax(model(x).double(), 1)
    truth = F.one_hot(y, len(SHARES)).double()
    guess = F.one_hot(chance.argmax(1), len(SHARES)).double()
    mine, whole = counts_of(rank.shard(guess), rank.shard(truth)), counts_of(guess, truth)
    rank.log(
        step=step,
        phase="eval",
        dice=100 * dice_of(whole),
        dice_soft=100 * dice_of(counts_of(chance, truth)),
        dice_share=100 * dice_of(mine),
    )
    rank.snapshot(step=step, phase="eval", mine=mine, whole=whole)


def counts_of(guess: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return overlap and size of each foreground class, shape (2, classes - 1)."""
    import torch

    return torch.stack([(guess * truth).sum(0), (guess + truth).sum(0)])[:, 1:]


def headline(found: Mapping[str, Finding]) -> str:
    """Say what is true, from the findings that carry it."""
    order, uneven, cure = (found[name] for name in ("order_bias", "uneven_counts", "global_count"))
    rounding = order.outcome is Outcome.REFUTED
    if rounding and uneven.outcome is cure.outcome is Outcome.HOLDS:
        return (
            f"Neither log_softmax nor the all-reduce order ({order.effect:.1e}, rounding): a mean "
            f"over uneven valid labels puts N ranks {uneven.effect:.1e} from one process in every "
            f"dtype, and dividing by the count of all ranks takes that to {cure.effect:.1e}."
        )
    if rounding and uneven.outcome is Outcome.UNKNOWN:
        return (
            f"N ranks and one process agree to rounding ({order.effect:.1e}) where every rank has "
            f"as many valid labels; unevenness was not decided: {uneven.reason}."
        )
    if Outcome.UNKNOWN in (order.outcome, uneven.outcome, cure.outcome):
        words = ("the all-reduce order", order), ("uneven counts", uneven), ("the remedy", cure)
        told = (f"{about} ({item.outcome.value}: {item.reason})" for about, item in words)
        return f"Not all is decided: {', '.join(told)}."
    return f"Not what is known of this failure: {order.reason}; {uneven.reason}; {cure.reason}."


NO_REPEATS = ("reference_bf16", "reference_soft_bf16", "reference_soft_rows")
"""Autocast's floor is not one of permutations; the last shares that of `reference_soft`."""


def _arm(name: str, role: Role, about: str, **options: Any) -> Arm:
    one = role is Role.REFERENCE
    usual = {"loss": "cross_entropy", "counts": "uneven", "dtype": "float64", "divisor": "rank"}
    return Arm(
        name=name,
        role=role,
        about=about,
        options=usual | options,
        ranks=1 if one else None,
        repeats="permutations" if one and name not in NO_REPEATS else 1,
    )


def _arms() -> tuple[Arm, ...]:
    """Return forms and label kinds, crossed with counts and dtypes, and a reference for each.

    The remedy is crossed with the dtypes for one loss; the other losses run in float64, which
    decides.
    """
    one = "one process on the global batch"
    found = [
        Arm(
            name=alone.ARM,
            role=Role.CONTROL,
            about="one process, no training: range and gradient of the loss",
            options={"loss": "alone"},
            ranks=1,
            repeats="permutations",
        )
    ]
    for suffix, dtype in DTYPES.items():
        found += [
            _arm(f"reference{suffix}", Role.REFERENCE, f"{one}, {dtype}", dtype=dtype),
            _arm(
                f"reference_soft{suffix}",
                Role.REFERENCE,
                f"{one}, soft, {dtype}",
                loss="soft",
                dtype=dtype,
            ),
        ]
    for loss in ("soft_rows", "class_weights", "dice_loss"):
        found.append(_arm(f"reference_{loss}", Role.REFERENCE, f"{one}, {loss}", loss=loss))
    for suffix, dtype in DTYPES.items():
        found += [
            _arm(
                f"equal{suffix}",
                Role.CONTROL,
                f"as many valid labels on every rank, {dtype}",
                counts="equal",
                dtype=dtype,
            ),
            _arm(
                f"uneven{suffix}",
                Role.FAULTY,
                f"mean over each rank's own valid labels, {dtype}",
                dtype=dtype,
            ),
            _arm(
                f"fixed{suffix}",
                Role.FIXED,
                f"sum / valid labels of all ranks * ranks, {dtype}",
                dtype=dtype,
                divisor="all ranks",
            ),
        ]
    for loss, about in (
        ("log_softmax", "log_softmax + nll_loss"),
        ("log_of_softmax", "log(softmax) + nll_loss"),
        ("soft", "soft labels, mean over valid rows"),
    ):
        found += [
            _arm(
                f"{counts}_{loss}{suffix}",
                role,
                f"{about}, {counts}, {dtype}",
                loss=loss,
                counts=counts,
                dtype=dtype,
            )
            for suffix, dtype in DTYPES.items()
            for counts, role in (("equal", Role.CONTROL), ("uneven", Role.FAULTY))
        ]
    found.append(
        _arm(
            "uneven_soft_rows",
            Role.CONTROL,
            "soft labels, mean over all rows, uneven",
            loss="soft_rows",
        )
    )
    for loss, about in (
        ("class_weights", "sum / class weights of the labels"),
        ("dice_loss", "soft Dice loss"),
    ):
        found += [
            _arm(loss, Role.FAULTY, f"{about} of each rank, equal", loss=loss, counts="equal"),
            _arm(
                f"{loss}_fixed",
                Role.FIXED,
                f"{about} of all ranks, equal",
                loss=loss,
                counts="equal",
                divisor="all ranks",
            ),
        ]
    return tuple(found)


SCENARIO = Scenario(
    title="4 GPUs end apart from one: a mean loss where valid labels are uneven",
    family="normalisation",
    cause="valid_count_mean",
    params=Params,
    run=run,
    check=check,
    headline=headline,
    differs=("loss_of", "valid_counts"),
    arms=_arms(),
    claims=(
        Claim(
            name="ranks_differ",
            kind=Kind.MECHANISM,
            text="The order of the all-reduce leaves different gradients on different ranks.",
            expects=Outcome.REFUTED,
            judge=judges.judge_ranks_differ,
            settles=("A12",),
        ),
        Claim(
            name="order_bias",
            kind=Kind.MECHANISM,
            text="The order of the all-reduce adds a small bias that accumulates over the steps.",
            expects=Outcome.REFUTED,
            judge=judges.judge_order_bias,
            settles=("A12",),
        ),
        Claim(
            name="rounding_scales",
            kind=Kind.MECHANISM,
            text="With equal counts the gap is rounding: it shrinks like the machine epsilon.",
            expects=Outcome.HOLDS,
            judge=judges.judge_rounding_scales,
        ),
        Claim(
            name="hard_labels",
            kind=Kind.MECHANISM,
            text="Hard labels cause the gap; with soft labels there is none.",
            expects=Outcome.REFUTED,
            judge=judges.judge_hard_labels,
        ),
        Claim(
            name="form_of_the_loss",
            kind=Kind.MECHANISM,
            text="log_softmax or log(softmax) written by hand drifts apart from cross_entropy.",
            expects=Outcome.REFUTED,
            judge=judges.judge_form,
            settles=("A57",),
        ),
        Claim(
            name="uneven_counts",
            kind=Kind.SYMPTOM,
            text="With uneven valid counts N ranks end apart from one process, in every dtype.",
            expects=Outcome.HOLDS,
            judge=judges.judge_uneven,
            source="NVIDIA/Megatron-LM#673",
            settles=("A12",),
        ),
        Claim(
            name="dice_gap",
            kind=Kind.SYMPTOM,
            text="The gap of uneven counts reaches Dice on a fixed evaluation set.",
            expects=Outcome.HOLDS,
            judge=judges.judge_dice,
            settles=("A13",),
        ),
        Claim(
            name="dice_proves_it",
            kind=Kind.MECHANISM,
            text="A Dice gap between N ranks and one process shows that gradients went wrong.",
            expects=Outcome.REFUTED,
            judge=judges.judge_metric,
            settles=("A13",),
        ),
        Claim(
            name="global_count",
            kind=Kind.REMEDY,
            text="Dividing by the valid labels of all ranks brings the gap back to rounding.",
            expects=Outcome.HOLDS,
            judge=judges.judge_global_count,
        ),
        Claim(
            name="class_weights",
            kind=Kind.SYMPTOM,
            text="Class weights have the same fault even with equal counts, and the same remedy.",
            expects=Outcome.HOLDS,
            judge=judges.judge_class_weights,
        ),
        Claim(
            name="dice_loss",
            kind=Kind.SYMPTOM,
            text="Soft Dice loss has the same fault even with equal counts, and the same remedy.",
            expects=Outcome.HOLDS,
            judge=judges.judge_dice_loss,
        ),
        *alone.CLAIMS,
    ),
    plots=(
        Plot(
            metric="loss",
            title="Training loss of each rank",
            arms=("reference", "uneven", "equal"),
            unit="nats",
        ),
        Plot(
            metric="grad.norm",
            title="Gradient norm after the all-reduce",
            arms=("reference", "equal", "uneven", "fixed"),
        ),
        Plot(
            metric="dice",
            title="Dice on the held-out rows",
            arms=("reference", "equal", "uneven", "fixed"),
            phase="eval",
            unit="points",
        ),
        Plot(
            metric="dice_share",
            title="Dice of each rank's share of the held-out rows: its mean is not Dice",
            arms=("equal",),
            phase="eval",
            unit="points",
        ),
    ),
)
