"""Dropout left on in evaluation: no_grad, a loop over nn.Dropout, F.dropout without training=.

Whether dropout acts is decided by one thing, the module's `training`. torch.no_grad() does not
touch it. A loop that switches off what is an nn.Dropout misses Dropout2d and AlphaDropout, which
are no subclasses of it, and F.dropout(x, p) is told nothing and drops for ever. An article has it
that the gradient mode decides as well, and that model.eval() leaves some kinds on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

KINDS = ("dropout", "dropout2d", "alpha", "function")


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/dropout_left_on.yaml."""

    trials: int = field(metadata=at_least(8))
    rows: int = field(metadata=at_least(8))
    channels: int = field(metadata=at_least(2))
    p: float = field(metadata=between(0.1, 0.9))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Evaluate a model with every kind of dropout; how they are switched off is what differs."""
    import torch
    from torch import nn
    from torch.nn.functional import dropout

    class Function(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if arm["function"] == "told":
                return dropout(x, p.p, training=self.training)
            return dropout(x, p.p)

    kinds = [nn.Dropout(p.p), nn.Dropout2d(p.p), nn.AlphaDropout(p.p), Function()]
    model = nn.ModuleDict(dict(zip(KINDS, kinds, strict=True)))
    if arm["off"] == "eval":
        model.eval()
    for module in model.modules():
        if arm["off"] == "loop" and isinstance(module, nn.Dropout):
            module.eval()
    for trial in range(p.trials):
        x = torch.randn(p.rows, p.channels, 4, 4).to(rank.device)
        with torch.set_grad_enabled(arm["grad"]):
            out = {kind: module(x) for kind, module in model.items()}
        for kind, y in out.items():
            rank.log(step=trial, phase=kind, changed=int(not torch.equal(y, x)))


def on(t: Tables, arm: str) -> list[str]:
    """Return the kinds of dropout that changed their input in any trial."""
    t.require(arm)
    return [kind for kind in KINDS if any(t.series(arm, "changed", phase=kind).values())]


def all_off(t: Tables, arm: str, kinds: tuple[str, ...] = KINDS) -> Finding:
    """Decide: in no trial of the arm does one of these kinds of dropout change a bit."""
    left = [kind for kind in on(t, arm) if kind in kinds]
    reason = f"still on in {arm}: {', '.join(left) or 'none'}"
    return (refuted if left else holds)(reason, evidence={"left_on": len(left)})


@mechanism(HOLDS, settles="A39")
def eval_is_identity(t: Tables) -> Finding:
    """In evaluation dropout returns its input, bit for bit."""
    return all_off(t, "eval")


@remedy(REFUTED, settles="A44")
def no_grad_switches_off(t: Tables) -> Finding:
    """Inside torch.no_grad() dropout is off, without eval()."""
    return all_off(t, "no_grad")


@mechanism(REFUTED, settles="A48")
def gradient_mode_decides(t: Tables) -> Finding:
    """Whether dropout acts depends on gradient mode and training mode together."""
    pairs = (("train", "no_grad"), ("eval", "told"))
    parted = [f"{one} and {two}" for one, two in pairs if on(t, one) != on(t, two)]
    said = f"{' and '.join(parted) or 'no two arms'} differ by the gradient mode alone"
    return (holds if parted else refuted)(said)


@symptom(REFUTED, settles="A78")
def eval_leaves_some_on(t: Tables) -> Finding:
    """model.eval() switches Dropout off and leaves Dropout2d and AlphaDropout on."""
    return negated(all_off(t, "eval", ("dropout2d", "alpha")))


@symptom(HOLDS, settles="A78")
def loop_leaves_some_on(t: Tables) -> Finding:
    """A loop over what is an nn.Dropout leaves Dropout2d and AlphaDropout on."""
    return negated(all_off(t, "loop", ("dropout2d", "alpha")))


@symptom(HOLDS)
def function_stays_on(t: Tables) -> Finding:
    """F.dropout(x, p) goes on dropping after model.eval()."""
    return negated(all_off(t, "function", ("function",)))


@remedy(HOLDS)
def tell_the_function(t: Tables) -> Finding:
    """With training=self.training model.eval() switches every kind off."""
    return all_off(t, "told")


SCENARIO = Scenario(
    title="Dropout left on in evaluation: only `training` decides, and not all are told",
    family="random numbers",
    cause="eval_forgotten",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        eval_is_identity=("eval() switches every module off", "eval() leaves dropout on"),
        loop_leaves_some_on=("a loop over nn.Dropout misses its kin", "a loop finds all"),
        function_stays_on=("F.dropout has to be told", "F.dropout knows by itself"),
    ),
    arms=(
        reference("eval", "model.eval()", ranks=1, off="eval", grad=True, function="told"),
        control("train", "in training", ranks=1, off="no", grad=True, function="told"),
        faulty("no_grad", "only no_grad", ranks=1, off="no", grad=False, function="told"),
        faulty("loop", "loop over nn.Dropout", ranks=1, off="loop", grad=False, function="told"),
        faulty("function", "F.dropout(x, p)", ranks=1, off="eval", grad=False, function="untold"),
        fixed("told", "training=self.training", ranks=1, off="eval", grad=False, function="told"),
    ),
    claims=(
        eval_is_identity,
        no_grad_switches_off,
        gradient_mode_decides,
        eval_leaves_some_on,
        loop_leaves_some_on,
        function_stays_on,
        tell_the_function,
    ),
)
