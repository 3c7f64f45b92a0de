"""Backward passes that DistributedDataParallel was not armed for, or could not finish."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.causes.unequal import first_of, last_of, unequal_gradients
from harness.watch.evidence import Evidence


@cause(
    family="synchronisation",
    sees="Every rank trains a model of its own; the loss falls on all of them, no error comes.",
    why="DDP arms its reducer in its own forward. A forward pass of the module inside it gives the "
    "same output and the same graph, and backward then reduces nothing.",
    confirm="Count the all-reduces of one backward pass: there are none.",
    change="call the wrapper, not the module inside it",
    fix="""
output = model(x)            # not model.module(x), nor a reference kept from before wrapping
""",
    reported=("kohya-ss/sd-scripts#989", "kohya-ss/sd-scripts#2244", "pytorch/pytorch#109774"),
)
def ddp_forward_bypassed(evidence: Evidence) -> Diagnosis | None:
    """Recognise a backward pass whose forward pass went past the wrapper."""
    unequal = unequal_gradients(evidence)
    module = None if unequal is None else unequal.hooked
    if unequal is None or module is None:
        return None
    through = unequal.count("forwards", module)
    past = unequal.count("forwards_past_wrapper", module)
    backwards = {rank: window.get("backwards", 0) for rank, window in unequal.windows.items()}
    never = [rank for rank in backwards if backwards[rank] and not through[rank]]
    alone = len(list(evidence.events("wrap", evidence.ranks[0]))) == 1
    partly = [rank for rank in backwards if past[rank] and through[rank] < backwards[rank]]
    bypassed = never or partly
    if not bypassed:
        return None
    first = bypassed[0]
    return Diagnosis(
        # With two models a backward pass may belong to the other one.
        strength=Strength.PROVEN if never or alone else Strength.LIKELY,
        because=(
            f"{through[first]} forward passes of the wrapper and {past[first]} of the module "
            f"inside it before this update, {backwards[first]} backward passes",
        ),
        where=first_of(unequal.windows[first], "forward_past_wrapper_at")
        or first_of(unequal.windows[first], "backward_at"),
        ranks=unequal.unless_all(bypassed),
    )


@cause(
    family="synchronisation",
    sees="Drift with gradient accumulation, or no speed-up from no_sync.",
    why="no_sync acts where the forward pass is made: it decides there whether the reducer is "
    "armed. A backward pass outside of it, after a forward pass inside, is not synchronised; one "
    "inside, after a forward pass outside, is.",
    confirm="Print model.require_backward_grad_sync at the forward pass before each update: it "
    "must be True for the last micro-batch.",
    change="put the forward pass inside no_sync as well, and the last micro-batch outside",
    fix="""
with model.no_sync() if not last else nullcontext():
    loss = criterion(model(x), y)      # the forward pass belongs inside as well
    loss.backward()
""",
    reported=(
        "huggingface/accelerate#1726",
        "facebookresearch/ClassyVision#706",
        "speechbrain/speechbrain#2010",
    ),
)
def no_sync_wrong_half(evidence: Evidence) -> Diagnosis | None:
    """Recognise an update whose last forward pass had synchronisation off, or no_sync in vain."""
    unequal = unequal_gradients(evidence)
    if unequal is None:
        return _in_vain(evidence)
    module = unequal.hooked
    if module is None:
        return None
    last = unequal.last("last_forward_synchronised", module)
    off = [rank for rank, synchronised in last.items() if synchronised is False]
    if not off:
        return None
    first = off[0]
    of, without = (
        unequal.count(what, module)[first] for what in ("forwards", "forwards_without_sync")
    )
    how = f"all {of}" if of == without else f"{without} of {of}, the last one among them,"
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(f"{how} forward passes before this update were made under no_sync",),
        where=last_of(unequal.windows[first], "forward_at"),
        ranks=unequal.unless_all(off),
    )


def _in_vain(evidence: Evidence) -> Diagnosis | None:
    """Recognise backward passes under no_sync none of whose forward passes was made there."""
    if evidence.divergence is not None:
        return None
    for window in evidence.events("update"):
        for name, count in window.items():
            if not name.startswith("backwards_without_sync of"):
                continue
            module = name.partition(" of ")[2]
            forwards = window.get(f"forwards of {module}", 0)
            if count <= forwards and not window.get(f"forwards_without_sync of {module}", 0):
                return Diagnosis(
                    strength=Strength.PROVEN,
                    because=(
                        f"{count} backward passes of an update under no_sync, of forward passes "
                        "outside of it: each of them was reduced all the same",
                    ),
                    where=first_of(window, "backward_at"),
                    step=window["update"],
                )
    return None


@cause(
    family="synchronisation",
    sees='Gradients differ in the first update; the second forward pass raises "Expected to have '
    'finished reduction in the prior iteration".',
    why="DDP waits for the gradient of every parameter of a bucket before it reduces the bucket. "
    "One that never comes keeps back the others, and the optimizer uses what each rank has.",
    confirm="Pass find_unused_parameters=True: the error goes away and the ranks agree.",
    change="use every parameter in every forward pass, or find_unused_parameters=True",
    fix="""
model = DistributedDataParallel(net, find_unused_parameters=True)
""",
    reported=("pytorch/pytorch#112152", "pytorch/pytorch#22049", "facebookresearch/fairseq2#484"),
)
def unused_parameters(evidence: Evidence) -> Diagnosis | None:
    """Recognise parameters with a hook that got no gradient."""
    unequal = unequal_gradients(evidence)
    module = None if unequal is None else unequal.hooked
    if unequal is None or module is None:
        return None
    told = unequal.wrapper(module)
    if told is None or told["find_unused_parameters"]:
        return None
    static = bool(told["static_graph"])
    hooked = {
        name
        for name, one in unequal.held.items()
        if one.module == module and one.was == "synchronised"
    }
    for rank in evidence.ranks:
        event = evidence.latest("parameters", rank, unequal.optimizer, unequal.step)
        if event is None:
            continue
        # What was unused in the first pass of a static graph may be so ever after.
        unused = [n for n in event["without_gradient"] if n in hooked and not static]
        frozen = [name for name in event["frozen"] if name in hooked]
        if not unused and not frozen:
            continue
        because = []
        if unused:
            because.append(f"no gradient came for {listed(unused)}")
        if frozen:
            because.append(f"requires_grad was turned off after wrapping: {listed(frozen)}")
        strength = Strength.LIKELY if static else Strength.PROVEN
        return Diagnosis(strength=strength, because=tuple(because), tensor=(unused + frozen)[0])
    return None


@cause(
    family="synchronisation",
    sees="With post-local SGD the model is worse, or after a resume another one on every rank.",
    why="A model averager counts updates itself, from 0, and does nothing during its warm-up. "
    "PostLocalSGDOptimizer keeps the counter in its state_dict; called bare it is lost in a "
    "resume, and called beside the wrapper it counts every update twice.",
    confirm="Print averager.step after the resume, and compare the weights after an average.",
    change="let PostLocalSGDOptimizer call the averager, and save and load its state_dict",
    fix="""
averager = PeriodicModelAverager(period=4, warmup_steps=100)   # as in PostLocalSGDState
optimizer = PostLocalSGDOptimizer(SGD(model.parameters(), lr=0.1), averager)
optimizer.load_state_dict(saved)       # with averager.step in it
""",
    reported=("pytorch/pytorch#74157",),
)
def model_averaging_misused(evidence: Evidence) -> Diagnosis | None:
    """Say that somebody other than an optimizer has to average what is not reduced."""
    if any(e["class"] == "PostLocalSGDOptimizer" for e in evidence.events("optimizer")):
        return None
    for event in evidence.events("wrapper"):
        if "post_localSGD_hook" in event["hooks"]:
            return Diagnosis(
                # A script may well keep the averager's counter by itself.
                strength=Strength.FACT,
                because=(
                    "gradients are reduced within subgroups only, and no optimizer here averages "
                    "the weights: the script has to call an averager, and to save its counter",
                ),
                explains=False,
            )
    return None
