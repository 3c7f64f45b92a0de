"""Watching gradient norms: a clip changes what it measures, and a hook sees something else.

clip_grad_norm_(max_norm=1.0) returns the norm and then clips to it; get_total_norm, or a bound of
infinity, only looks. A backward hook on a Sequential is called once, with the gradient of the
loss by the output, which is no parameter's. And no number is an explosion by itself: a loss that
is summed and not averaged has gradients as many times larger as the batch has samples, and trains
the same at a learning rate as many times smaller. From two articles.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, is_rounding, matches, negated, repeats_records, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, unknown

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/grad_probe.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train and note the size of the gradients; what notes it is what differs."""
    import torch
    from torch.nn.utils import clip_grad_norm_, get_total_norm

    from scenarios._models import gradients, net, rows, weights

    model = net(rank)
    seen: list[float] = []

    def hook(module: Any, entering: Any, leaving: Any) -> None:
        seen.append(float(leaving[0].norm()))

    if arm["probe"] == "hook":
        model.register_full_backward_hook(hook)
    lr = p.lr / p.batch if arm.get("loss") == "summed" else p.lr
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x, y = rows(rank, p.batch)
    x.requires_grad_()  # Or the hook warns that it hangs on the outputs' gradients alone.
    for step in range(p.steps):
        optimizer.zero_grad()
        how = "sum" if arm.get("loss") == "summed" else "mean"
        torch.nn.functional.mse_loss(model(x), y, reduction=how).backward()
        true = gradients(model).norm()
        if arm["probe"] == "clip":
            seen = [float(clip_grad_norm_(model.parameters(), max_norm=1.0))]
        elif arm["probe"] == "clip_inf":
            seen = [float(clip_grad_norm_(model.parameters(), max_norm=float("inf")))]
        elif arm["probe"] == "total_norm":
            grads = [w.grad for w in model.parameters() if w.grad is not None]
            seen = [float(get_total_norm(grads))]
        rank.log(step=step, true=true, calls=len(seen))
        if seen:
            rank.log(step=step, seen=seen.pop())
        optimizer.step()
        rank.snapshot(step=step, weights=weights(model))


def sees_norm(t: Tables, arm: str) -> Finding:
    """Decide: at every step the probe gives the norm of all gradients, before it does anything."""
    t.require(arm)
    true, seen = t.series(arm, "true"), t.series(arm, "seen")
    off = max(abs(seen[step] / true[step] - 1) for step in true)
    reason = f"{arm}: {seen[0]:.4g} is seen at step 0, the norm is {true[0]:.4g}"
    return is_rounding(off, dtype_floor(EPS["float64"] * 10), reason, "of the norm")


@mechanism(REFUTED, settles="A77")
def hook_sees_layers(t: Tables) -> Finding:
    """A backward hook on the model is called for each of its layers."""
    return counts(t, "hook", "calls", 3, "calls")


@symptom(REFUTED, settles="A77")
def hook_sees_norm(t: Tables) -> Finding:
    """What the hook sees is the norm of the gradients."""
    return sees_norm(t, "hook")


@symptom(REFUTED, settles="B42")
def clip_only_looks(t: Tables) -> Finding:
    """clip_grad_norm_ with max_norm=1.0 is a probe of gradient norms: the training is the same."""
    return repeats_records(t, "clip", "unwatched", "weights")


@remedy(HOLDS)
def total_norm(t: Tables) -> Finding:
    """get_total_norm sees the norm and changes nothing."""
    same = repeats_records(t, "total_norm", "unwatched", "weights")
    return all_of(sees_norm(t, "total_norm"), same)


@remedy(HOLDS)
def clip_inf(t: Tables) -> Finding:
    """clip_grad_norm_ with a bound of infinity is one as well."""
    same = repeats_records(t, "clip_inf", "unwatched", "weights")
    return all_of(sees_norm(t, "clip_inf"), same)


@symptom(REFUTED, settles="B43")
def above_100(t: Tables) -> Finding:
    """A gradient norm above 100 is an explosion: training with it is not as it is below."""
    same = matches(t, "summed", "unwatched", "weights")
    below = max(t.series("unwatched", "true").values())
    above = min(t.series("summed", "true").values())
    if not below < 100 < above:
        return unknown(f"norms of {below:.3g} and {above:.3g} are not on both sides of 100")
    reason = f"norms above {above:.4g} and below {below:.3g}: {same.reason}"
    return dataclasses.replace(negated(same), reason=reason)


SCENARIO = Scenario(
    title="Probes of gradient norms: a clip changes the run, a hook sees something else",
    family="clipping",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        clip_only_looks=("a clip only looks", "a clip at 1.0 changes the training it measures"),
        hook_sees_norm=("the hook sees the norm", "the hook sees the output's gradient"),
        above_100=("above 100 is an explosion", "what is above 100 trains the same"),
    ),
    arms=(
        one_process("nothing is watched", name="unwatched", probe="none"),
        faulty("clip", "clip_grad_norm_(1.0)", ranks=1, probe="clip"),
        faulty("hook", "a backward hook", ranks=1, probe="hook"),
        control("summed", "reduction='sum', lr / batch", ranks=1, probe="none", loss="summed"),
        fixed("total_norm", "get_total_norm", ranks=1, probe="total_norm"),
        fixed("clip_inf", "clip_grad_norm_(inf)", ranks=1, probe="clip_inf"),
    ),
    claims=(hook_sees_layers, hook_sees_norm, clip_only_looks, total_norm, clip_inf, above_100),
)
