"""static_graph and gradient accumulation: the first pass under no_sync ends in an INTERNAL ASSERT.

With static_graph=True DDP learns in its first pass which gradients to wait for. An accumulation
loop makes just that pass under no_sync, where DDP prepares nothing, and its hooks then fail with
"expect_autograd_hooks_ INTERNAL ASSERT FAILED", which reads like a fault of torch. One synchronised
pass first is enough. Reported in huggingface/accelerate#3679, pytorch/pytorch#143580 and
Lightning-AI/pytorch-lightning#18086.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/static_graph_no_sync.yaml."""

    steps: int = field(metadata=at_least(2))
    micro_batches: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Every micro-batch is shared equally."""
    parts = ranks * p.micro_batches
    if p.batch % parts == 0:
        return []
    enough = parts * max(1, round(p.batch / parts))
    return [f"scenario.batch={p.batch} is no multiple of {parts}; type scenario.batch={enough}"]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Accumulate gradients over micro-batches; which passes are made under no_sync differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank), static_graph=arm["static_graph"])
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    if arm["first"] == "thrown_away":
        model(x[:1]).sum().backward()
    for step in range(p.steps):
        optimizer.zero_grad()
        parts = zip(x.chunk(p.micro_batches), y.chunk(p.micro_batches), strict=True)
        for micro, (inputs, targets) in enumerate(parts):
            alone: Any = nullcontext()
            if micro < p.micro_batches - 1 and not (arm["first"] == "synchronised" and step == 0):
                alone = model.no_sync()
            rank.log(step=step, phase="begins", micro=micro)
            try:
                with alone:
                    loss = torch.nn.functional.mse_loss(model(inputs), targets) / p.micro_batches
                    loss.backward()
            except RuntimeError as error:
                rank.log(step=step, phase="raised", micro=micro, error=str(error))
                return
        optimizer.step()
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="huggingface/accelerate#3679")
def asserts(t: Tables) -> Finding:
    """Accumulating under no_sync with static_graph fails with an INTERNAL ASSERT on every rank."""
    t.require("static")
    ranks = t.ranks("static")
    said = [t.last("static", "error", phase="raised", rank=rank) for rank in ranks]
    failed = sum("expect_autograd_hooks_ INTERNAL ASSERT" in error for error in said)
    reason = f"{failed} of {len(said)} ranks: {said[0][:60]}"
    return (holds if failed == len(said) else refuted)(reason, effect=float(failed), unit="ranks")


@mechanism(REFUTED)
def in_the_synchronised_pass(t: Tables) -> Finding:
    """It fails in the last pass of the window, the first one that is synchronised."""
    t.require("static")
    last = t.root_params["micro_batches"] - 1
    at = {t.last("static", "micro", phase="raised", rank=rank) for rank in t.ranks("static")}
    reason = f"it fails in micro-batch {sorted(at)}, counted from 0, of {last + 1}"
    return (holds if at == {last} else refuted)(reason, effect=float(max(at)), unit="micro-batch")


@remedy(HOLDS)
def first_window_synchronised(t: Tables) -> Finding:
    """With the first window outside of no_sync static_graph may stay: like one process."""
    return like_one_process(t, "first_synchronised")


@remedy(HOLDS)
def one_pass_thrown_away(t: Tables) -> Finding:
    """One synchronised pass before the loop, its gradients thrown away, is enough."""
    return like_one_process(t, "thrown_away")


@remedy(HOLDS, source="Lightning-AI/pytorch-lightning#18086")
def without_static_graph(t: Tables) -> Finding:
    """Without static_graph the same loop trains like one process."""
    return like_one_process(t, "not_static")


SCENARIO = Scenario(
    title="static_graph with gradient accumulation: the first pass under no_sync is an assert",
    family="synchronisation",
    cause="static_graph_no_sync",
    params=Params,
    run=run,
    check=check,
    headline=says(
        asserts=("static_graph asserts under no_sync", "static_graph and no_sync go together"),
        in_the_synchronised_pass=("in the first synchronised pass", "in the very first pass"),
        one_pass_thrown_away=("one synchronised pass first is enough", "one pass is not enough"),
    ),
    arms=(
        one_process("one process", static_graph=False, first="as_all"),
        faulty("static", "static_graph=True", static_graph=True, first="as_all"),
        fixed("first_synchronised", "first window", static_graph=True, first="synchronised"),
        fixed("thrown_away", "a pass before the loop", static_graph=True, first="thrown_away"),
        fixed("not_static", "static_graph=False", static_graph=False, first="as_all"),
    ),
    claims=(
        asserts,
        in_the_synchronised_pass,
        first_window_synchronised,
        one_pass_thrown_away,
        without_static_graph,
    ),
)
