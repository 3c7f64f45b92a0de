"""Converting the wrapped model and back: the hooks of DDP are gone, and nothing is averaged.

DDP hangs its reduction on the node that accumulates a parameter's gradient. A change of dtype or
device gives the parameter a new node: model.float().double(), as an export, a checkpoint or a stay
on the CPU may do, leaves the same numbers in the same Parameter objects, and no hook. Backward
sends nothing, without an error or a warning. Reported in pytorch/pytorch#104336,
Lightning-AI/pytorch-lightning#17937 (to the CPU and back).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import counts, like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/hooks_lost.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a net that is converted once and back; at which moment is all that differs."""
    import copy

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from harness.collectives import count_collectives
    from scenarios._models import net, rows, weights

    # In float32 from the start: the round trip then changes no bit of any weight.
    layers = net(rank).float().double()
    x, y = rows(rank, p.batch)
    model = DistributedDataParallel(layers)
    known = {id(parameter) for parameter in model.parameters()}
    if arm["converts"] == "wrapped":
        model.float().double()
    elif arm["converts"] == "copy":
        copy.deepcopy(layers).float().double()
    elif arm["converts"] == "no change":
        model.double().to(rank.device)
    if arm.get("wraps_again"):
        model = DistributedDataParallel(model.module)
    same = sum(id(parameter) in known for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        with count_collectives() as calls:
            loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss, reductions=calls.count("all_reduce"), same=same)
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="pytorch/pytorch#104336")
def ranks_part(t: Tables) -> Finding:
    """After model.float().double() the ranks' weights part."""
    return negated(ranks_agree(t, "converted", "weights"))


@mechanism(HOLDS)
def nothing_reduced(t: Tables) -> Finding:
    """Backward issues no all-reduce any more."""
    return counts(t, "converted", "reductions", 0, "all-reduces in backward")


@mechanism(REFUTED)
def parameters_replaced(t: Tables) -> Finding:
    """Conversion puts other Parameter objects into the model, which DDP does not know."""
    return negated(counts(t, "converted", "same", 4, "of the parameters that DDP has wrapped"))


@symptom(REFUTED)
def loss_stops(t: Tables) -> Finding:
    """One sees it in the loss, which stops falling."""
    t.require("converted")
    losses = [list(t.series("converted", "loss", rank=r).values()) for r in t.ranks("converted")]
    ratio = max(loss[-1] / loss[0] for loss in losses)
    reason = f"on every rank the last loss is at most {ratio:.3f} of the first"
    return (refuted if ratio < 1.0 else holds)(reason, effect=ratio, unit="last loss / first")


@mechanism(HOLDS)
def same_type_is_safe(t: Tables) -> Finding:
    """A conversion that changes neither dtype nor device, such as .double() here, does no harm."""
    return like_one_process(t, "no_change")


@remedy(HOLDS)
def wrap_again(t: Tables) -> Finding:
    """Wrap model.module again after the conversion: N ranks train like one process."""
    return like_one_process(t, "wrapped_again")


@remedy(HOLDS)
def convert_a_copy(t: Tables) -> Finding:
    """Convert a copy, and leave the wrapped model alone: the same."""
    return like_one_process(t, "copied")


SCENARIO = Scenario(
    title="A wrapped model converted and back loses DDP's hooks: gradients are never averaged",
    family="synchronisation",
    cause="hooks_lost",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        ranks_part=("a conversion and back makes one model per rank", "replicas stay equal"),
        nothing_reduced=("backward sends nothing", "backward still sends something"),
        parameters_replaced=("its parameters are others", "though its parameters are the same"),
        wrap_again=("wrapping again is right", "wrapping again is wrong, too"),
    ),
    arms=(
        one_process("one process, no conversion", converts="never"),
        faulty("converted", "model.float().double() after wrapping", converts="wrapped"),
        control("no_change", ".double() on a model in float64", converts="no change"),
        fixed("wrapped_again", "converted, wrapped again", converts="wrapped", wraps_again=True),
        fixed("copied", "a copy is converted", converts="copy"),
    ),
    claims=(
        ranks_part,
        nothing_reduced,
        parameters_replaced,
        loss_stops,
        same_type_is_safe,
        wrap_again,
        convert_a_copy,
    ),
    plots=(Plot(metric="loss", title="Loss of each rank's own rows", log=True),),
)
