"""A loaded model gives other outputs than the saved one: it is still in train mode.

In train mode a batch norm normalises with the batch at hand, so that what comes out for one row
depends on the rows beside it, and every call moves the running statistics. torch.no_grad() changes
neither; what it spares is the graph. One call in train mode is enough to change all that follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, says
from harness.scenario import Arm, Finding, Scenario, at_least

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/eval_mode.yaml."""

    steps: int = field(metadata=at_least(1))
    rows: int = field(metadata=at_least(3))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train, save, load, evaluate; what is done before the evaluation is what differs."""
    import torch
    from torch import nn

    from scenarios._models import FEATURES, mlp, rows

    def build() -> nn.Sequential:
        norm = nn.BatchNorm1d(12, dtype=torch.float64)
        first = mlp((FEATURES, 12), generator=rank.generator("first"))
        last = mlp((12, 1), generator=rank.generator("last"))
        return nn.Sequential(first, norm, nn.Tanh(), last).to(rank.device)

    trained = build()
    optimizer = torch.optim.SGD(trained.parameters(), lr=p.lr)
    x, y = rows(rank, p.rows)
    for _ in range(p.steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(trained(x), y).backward()
        optimizer.step()
    model = build()
    model.load_state_dict(trained.state_dict())
    probe, others = rows(rank, p.rows, name="probe")[0], rows(rank, p.rows, name="others")[0]
    if arm["mode"] == "eval_late":
        model(2.0 * probe)
    if arm["mode"] != "train":
        model.eval()
    with torch.set_grad_enabled(arm["grad"]):
        output = model(probe)
        beside_others = model(torch.cat([probe[:1], others[1:]]))
    for buffer in model.buffers():
        buffer.fill_(3)
    rank.log(
        step=0,
        as_saved=int(torch.equal(output, trained.eval()(probe))),
        depends_on_rows=int(not torch.equal(output[0], beside_others[0])),
        keeps_graph=int(output.requires_grad),
        reads_averages=int(not torch.equal(output, model(probe))),
    )


def is_so(t: Tables, arm: str, fact: str, answer: int = 1) -> Finding:
    """Decide: a fact is true of the arm, or with `answer=0` false."""
    return counts(t, arm, fact, answer, f"(1 = true, 0 = false) for {fact.replace('_', ' ')}")


@symptom(HOLDS, settles="B64")
def loaded_differs(t: Tables) -> Finding:
    """A loaded model gives other outputs than the saved one where eval() was forgotten."""
    return all_of(is_so(t, "train", "as_saved", 0), is_so(t, "eval", "as_saved"))


@symptom(HOLDS, settles="A02")
def depends_on_mates(t: Tables) -> Finding:
    """In train mode what comes out for a row depends on the rows beside it, in eval mode not."""
    return all_of(is_so(t, "train", "depends_on_rows"), is_so(t, "eval", "depends_on_rows", 0))


@mechanism(HOLDS, settles="A18")
def evaluation_reads_the_averages(t: Tables) -> Finding:
    """Training normalises with the batch, evaluation with the running statistics."""
    return all_of(is_so(t, "eval", "reads_averages"), is_so(t, "train", "reads_averages", 0))


@mechanism(REFUTED, settles="A23")
def training_reads_the_averages(t: Tables) -> Finding:
    """Once the running statistics are wrong, training goes on from a wrong normalisation."""
    return is_so(t, "train", "reads_averages")


@remedy(REFUTED, settles="B65")
def no_grad_is_enough(t: Tables) -> Finding:
    """Inside torch.no_grad() a loaded model is evaluated as it was saved, without eval()."""
    return is_so(t, "no_grad", "as_saved")


@remedy(HOLDS, settles="B65")
def no_grad_keeps_no_graph(t: Tables) -> Finding:
    """Inference belongs into torch.no_grad(): beside eval() it keeps no graph."""
    return all_of(is_so(t, "eval_no_grad", "as_saved"), is_so(t, "eval_no_grad", "keeps_graph", 0))


@symptom(HOLDS)
def one_call_is_enough(t: Tables) -> Finding:
    """One forgotten call in train mode changes every evaluation after it."""
    return is_so(t, "eval_late", "as_saved", 0)


SCENARIO = Scenario(
    title="A loaded model gives other outputs than the saved one: eval() was forgotten",
    family="buffers",
    cause="eval_forgotten",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        loaded_differs=("without eval() a loaded model is another one", "eval() is not needed"),
        no_grad_is_enough=("no_grad is enough", "no_grad does not help"),
    ),
    arms=(
        reference("eval", "eval()", ranks=1, mode="eval", grad=True),
        faulty("train", "as loaded", ranks=1, mode="train", grad=True),
        faulty("no_grad", "only no_grad", ranks=1, mode="train", grad=False),
        faulty("eval_late", "one call before eval()", ranks=1, mode="eval_late", grad=True),
        fixed("eval_no_grad", "eval() and no_grad", ranks=1, mode="eval", grad=False),
    ),
    claims=(
        loaded_differs,
        depends_on_mates,
        evaluation_reads_the_averages,
        training_reads_the_averages,
        no_grad_is_enough,
        no_grad_keeps_no_graph,
        one_call_is_enough,
    ),
)
