"""A layer exchanged after wrapping: DDP reduces the old one's gradients, and the new one's never.

DDP registers its hooks on the parameters that the module has when it is wrapped. A new head for
another number of classes, or a resized embedding, assigned afterwards has none: its gradient stays
each rank's own. DDP notices that the old head takes no part and raises in the second forward, but
the flag that its message proposes only makes it content. Reported in pytorch/pytorch#12603.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/params_replaced.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Give a net a new head and train it; when it is wrapped is what differs."""
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import SGD

    from scenarios._models import mlp, net, rows, weights

    layers = net(rank)
    head = mlp((12, 1), generator=rank.generator("new head"))[0].to(rank.device)
    if arm["replaced"] == "after":
        model = DistributedDataParallel(layers, find_unused_parameters=arm["find_unused"])
        layers[2] = head
    elif arm["replaced"] == "before":
        layers[2] = head
        model = DistributedDataParallel(layers)
    else:
        model = DistributedDataParallel(layers)
        layers[2] = head
        model = DistributedDataParallel(model.module)
    optimizer = SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    raised = ""
    for step in range(p.steps):
        optimizer.zero_grad()
        try:
            loss = mse_loss(model(x), y)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raised = str(error)
            break
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, weights=weights(model))
        rank.digest(step=step, body=weights(layers[0]), head=weights(layers[2]))
    rank.log(step=p.steps, phase="end", updates=step if raised else p.steps, raised=raised)


@symptom(HOLDS, source="pytorch/pytorch#12603")
def head_parts(t: Tables) -> Finding:
    """The new head's weights part in the first update, with the flag and without."""
    return all_of(*(negated(ranks_agree(t, arm, "head")) for arm in ("flag_off", "flag_on")))


@symptom(HOLDS)
def raises_late(t: Tables) -> Finding:
    """Without find_unused_parameters every rank raises, when one wrong update has been made."""
    t.require("flag_off")
    ends = {
        rank: (t.last("flag_off", "updates", rank=rank), t.last("flag_off", "raised", rank=rank))
        for rank in t.ranks("flag_off")
    }
    due = all(updates == 1 and raised for updates, raised in ends.values())
    reason = f"updates made before an error: {[updates for updates, _ in ends.values()]}"
    said = ends[0][1].partition(".")[0] or "nothing"
    return (holds if due else refuted)(f"{reason}; it said: {said}", evidence={"raised": said})


@remedy(REFUTED)
def flag_helps(t: Tables) -> Finding:
    """The flag that the message proposes, find_unused_parameters=True, cures it."""
    return like_one_process(t, "flag_on")


@mechanism(HOLDS)
def old_layers_agree(t: Tables) -> Finding:
    """With the flag the layers that were there at wrapping stay equal, bit for bit."""
    return ranks_agree(t, "flag_on", "body")


@remedy(HOLDS)
def replace_first(t: Tables) -> Finding:
    """Replace the head, then wrap: N ranks train like one process."""
    return like_one_process(t, "before_wrap")


@remedy(HOLDS)
def wrap_again(t: Tables) -> Finding:
    """Wrap the module once more after the replacement: the same."""
    return like_one_process(t, "wrapped_again")


SCENARIO = Scenario(
    title="A layer replaced after wrapping is never reduced; the proposed flag hides it",
    family="synchronisation",
    cause="params_replaced",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        head_parts=("a head replaced after wrapping parts", "a replaced head stays equal"),
        raises_late=("DDP raises one update late", "DDP does not raise one update late"),
        flag_helps=("its flag cures it", "the flag it proposes only silences it"),
        wrap_again=("wrapping again is right", "wrapping again is wrong, too"),
    ),
    arms=(
        one_process("one process, new head", replaced="before"),
        faulty("flag_off", "wrap, then replace", replaced="after", find_unused=False),
        faulty("flag_on", "with find_unused_parameters", replaced="after", find_unused=True),
        fixed("before_wrap", "replace, then wrap", replaced="before"),
        fixed("wrapped_again", "wrap, replace, wrap again", replaced="again"),
    ),
    claims=(head_parts, raises_late, flag_helps, old_layers_agree, replace_first, wrap_again),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
