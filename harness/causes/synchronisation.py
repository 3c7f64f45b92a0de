"""Gradients that are not synchronised although DistributedDataParallel is there."""

from __future__ import annotations

from collections import Counter

from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.causes.initial_state import structure_differs
from harness.causes.unequal import Unequal, unequal_gradients
from harness.watch.evidence import Evidence
from harness.watch.journal import Event


def _hooked(unequal: Unequal) -> int | None:
    """Return the wrapper of the first parameter concerned that has a hook of it."""
    return next((one.module for one in unequal.owned if one.was == "synchronised"), None)


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
    module = None if unequal is None else _hooked(unequal)
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
        where=_first(unequal.windows[first], "forward_past_wrapper_at")
        or _first(unequal.windows[first], "backward_at"),
        ranks=_unless_all(bypassed, unequal),
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
    module = _hooked(unequal)
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
        where=_last(unequal.windows[first], "forward_at"),
        ranks=_unless_all(off, unequal),
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
                    where=_first(window, "backward_at"),
                    step=window["update"],
                )
    return None


@cause(
    family="synchronisation",
    sees="One layer differs between ranks, all others agree; often a new head or a resized "
    "embedding.",
    why="DDP puts its hooks on the parameters that are there when it wraps. A parameter assigned "
    "later has none: its gradient is each rank's own.",
    confirm="Compare id(p) of model.parameters() right after wrapping and before the update.",
    change="replace layers before wrapping, or wrap again",
    fix="""
net.head = nn.Linear(512, classes)     # first
model = DistributedDataParallel(net)   # then
optimizer = SGD(model.parameters(), lr=0.1)
""",
    reported=("pytorch/pytorch#12603",),
)
def params_replaced(evidence: Evidence) -> Diagnosis | None:
    """Recognise parameters that are below a wrapper and were not when it was made."""
    unequal = unequal_gradients(evidence)
    new = [] if unequal is None else [one.name for one in unequal.owned if one.was == "absent"]
    if not new or unequal is None:
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(f"not there when the model was wrapped: {listed(new)}",),
        where=_wrapped_at(evidence, unequal, new[0]),
        tensor=new[0],
    )


@cause(
    family="synchronisation",
    sees="After a backbone is unfrozen each rank has a backbone of its own; the head still agrees.",
    why="DDP ignores parameters that do not require a gradient when it wraps. They have no hook "
    "when they are unfrozen later, and find_unused_parameters does not give them one.",
    confirm="Wrap the same model again after unfreezing: the ranks agree.",
    change="wrap again after unfreezing, or freeze by a learning rate of 0",
    fix="""
net.backbone.requires_grad_(True)
model = DistributedDataParallel(net)   # again: the first wrapper ignores the backbone for good
""",
    reported=(
        "Lightning-AI/pytorch-lightning#20340",
        "huggingface/transformers#416",
        "open-mmlab/OpenPCDet#1118",
    ),
)
def unfrozen_after_wrap(evidence: Evidence) -> Diagnosis | None:
    """Recognise parameters that did not require a gradient when they were wrapped."""
    unequal = unequal_gradients(evidence)
    thawed = [] if unequal is None else [one.name for one in unequal.owned if one.was == "frozen"]
    if not thawed or unequal is None:
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(f"requires_grad was False when the model was wrapped: {listed(thawed)}",),
        where=_wrapped_at(evidence, unequal, thawed[0]),
        tensor=thawed[0],
    )


@cause(
    family="synchronisation",
    sees="Some parameters differ between ranks from their first update on.",
    why="DDP leaves out what _ddp_params_and_buffers_to_ignore names: it neither sends their "
    "values around nor reduces their gradients.",
    confirm="Print model.parameters_to_ignore.",
    change="take them off the list of what DDP ignores, or reduce them yourself",
    fix="""
for parameter in ignored:              # after backward, before the update
    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
""",
)
def params_ignored(evidence: Evidence) -> Diagnosis | None:
    """Recognise parameters that the wrapper was told to leave out."""
    unequal = unequal_gradients(evidence)
    left = [] if unequal is None else [one.name for one in unequal.owned if one.was == "ignored"]
    if not left or unequal is None or len(left) < len(unequal.names):
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(f"the wrapper was told to ignore {listed(left)}",),
        where=_wrapped_at(evidence, unequal, left[0]),
        tensor=left[0],
    )


@cause(
    family="synchronisation",
    sees="Nothing is synchronised although the wrapper is called; the model was converted to "
    "another type or device after it had been wrapped.",
    why="DDP's hooks sit on the node that accumulates a parameter's gradient. Changing the type or "
    "device of a parameter throws that node away, even if it is changed back.",
    confirm="Move .double(), .half() or .to() before the wrapping: the ranks agree.",
    change="convert the model before wrapping it",
    fix="""
net = net.to(device, dtype)            # first
model = DistributedDataParallel(net)   # then
""",
    reported=("pytorch/pytorch#104336",),
)
def hooks_lost(evidence: Evidence) -> Diagnosis | None:
    """Recognise a conversion of the wrapped module since the last update that was right."""
    unequal = unequal_gradients(evidence)
    module = None if unequal is None else _hooked(unequal)
    if unequal is None or module is None:
        return None
    first: Event | None = None
    ranks = []
    for rank in evidence.ranks:
        for event in evidence.events("conversion", rank):
            recent = unequal.before(rank) < event["step"] <= unequal.windows[rank]["step"]
            if event["module"] == module and recent:
                first = first or event
                ranks.append(rank)
                break
    if first is None:
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"{len(first['parameters'])} parameters were converted from {first['before']} to "
            f"{first['after']} after the model had been wrapped",
        ),
        where=first["at"],
        ranks=_unless_all(ranks, unequal),
    )


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
    module = None if unequal is None else _hooked(unequal)
    if unequal is None or module is None:
        return None
    told = unequal.wrapper(module)
    if told is None or told["find_unused_parameters"] or told["static_graph"]:
        return None
    hooked = {
        name
        for name, one in unequal.held.items()
        if one.module == module and one.was == "synchronised"
    }
    for rank in evidence.ranks:
        event = evidence.latest("parameters", rank, unequal.optimizer, unequal.step)
        if event is None:
            continue
        unused = [name for name in event["without_gradient"] if name in hooked]
        frozen = [name for name in event["frozen"] if name in hooked]
        if not unused and not frozen:
            continue
        because = []
        if unused:
            because.append(f"no gradient came for {listed(unused)}")
        if frozen:
            because.append(f"requires_grad was turned off after wrapping: {listed(frozen)}")
        return Diagnosis(
            strength=Strength.PROVEN, because=tuple(because), tensor=(unused + frozen)[0]
        )
    return None


@cause(
    family="synchronisation",
    sees="Gradients of one wrapped model differ between ranks although backward has reduced them.",
    why="A communication hook stands in for DDP's all-reduce. What it returns is the gradient, and "
    "if it does not return the same on every rank the replicas part.",
    confirm="Leave out register_comm_hook: the ranks agree.",
    change="let the communication hook return the same on every rank",
    fix="""
model.register_comm_hook(None, default_hooks.allreduce_hook)   # as DDP does without a hook
""",
)
def communication_hook(evidence: Evidence) -> Diagnosis | None:
    """Recognise a hook that is all that stands between backward and the gradients."""
    unequal = unequal_gradients(evidence)
    if unequal is None:
        return _hook_is_there(evidence)
    module = _hooked(unequal)
    if module is None or _otherwise_explained(evidence):
        return None
    told = unequal.wrapper(module)
    if told is None or not told["hooks"]:
        return None
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(f"the wrapper has the communication hook {', '.join(told['hooks'])}",),
    )


def _hook_is_there(evidence: Evidence) -> Diagnosis | None:
    for event in evidence.events("wrapper"):
        if event["hooks"]:
            return Diagnosis(
                strength=Strength.FACT,
                because=(
                    f"wrapper {event['module']} reduces with the communication hook "
                    f"{', '.join(event['hooks'])}: gradients are what it returns",
                ),
                explains=False,
            )
    return None


@cause(
    family="synchronisation",
    sees="Gradients of one wrapped model differ between ranks in one update, on few ranks.",
    why="DDP leaves the same bits in the gradient on every rank. Whoever changes it afterwards on "
    "some of them, such as a filter for NaN or a clip on rank 0, makes the replicas part.",
    confirm="Compare p.grad right after backward and right before the update.",
    change="do the same to the gradients on every rank",
    fix="""
loss.backward()
change(model.parameters())             # on every rank, and decided by all of them together
optimizer.step()
""",
)
def gradient_changed_on_one_rank(evidence: Evidence) -> Diagnosis | None:
    """Recognise gradients that part behind a reduction that was armed and complete."""
    unequal = unequal_gradients(evidence)
    module = None if unequal is None else _hooked(unequal)
    if unequal is None or module is None or _otherwise_explained(evidence):
        return None
    told = unequal.wrapper(module)
    synchronised = unequal.last("last_forward_synchronised", module)
    backwards = {window.get("backwards", 0) for window in unequal.windows.values()}
    odd = unequal.differences[0].odd
    if told is None or told["hooks"] or not all(synchronised.values()) or 0 in backwards:
        return None
    if not odd and len(evidence.ranks) > 2:
        return None
    return Diagnosis(
        strength=Strength.LIKELY,
        because=("the wrapper was called, its reduction was on, and no hook was lost",),
        ranks=odd,
    )


@cause(
    family="synchronisation",
    sees="One rank has other gradients than the rest in one update, and has made more or fewer "
    "passes for it.",
    why="An update that one rank leaves out, or a micro-batch more on it, leaves gradients of "
    "other batches there. Every rank makes its own update, and nobody compares their numbers.",
    confirm="Count the backward passes and updates of each rank.",
    change="decide together whether an update is made, and from how many micro-batches",
    fix="""
bad = (~loss.isfinite()).int()
dist.all_reduce(bad, op=dist.ReduceOp.MAX)     # one rank's trouble is everybody's
if not bad:
    optimizer.step()
""",
    reported=("NVIDIA-NeMo/Automodel#2468", "facebookresearch/mmf#1073"),
)
def update_skipped_on_one_rank(evidence: Evidence) -> Diagnosis | None:
    """Recognise ranks whose passes before an update are not as many as those of the others."""
    unequal = unequal_gradients(evidence)
    if unequal is None:
        return None
    counts = {r: (w.get("forwards", 0), w.get("backwards", 0)) for r, w in unequal.windows.items()}
    most = Counter(counts.values()).most_common(2)
    if len(most) < 2 or (most[0][1] == most[1][1] and len(counts) > 2):
        return None
    usual = most[0][0]
    if len(counts) == 2:
        before = evidence.update(evidence.ranks[0], unequal.optimizer, unequal.step - 1) or {}
        usual = before.get("forwards", 0), before.get("backwards", 0)
    odd = [rank for rank, count in counts.items() if count != usual]
    if not odd or len(odd) == len(counts):
        return None
    forwards, backwards = counts[odd[0]]
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"{forwards} forward and {backwards} backward passes before this update, on the "
            f"other ranks {usual[0]} and {usual[1]}",
        ),
        where=_last(unequal.windows[odd[0]], "backward_at"),
        ranks=tuple(odd),
    )


_BEFORE_BACKWARD_IS_OVER = (
    ddp_forward_bypassed,
    no_sync_wrong_half,
    params_replaced,
    unfrozen_after_wrap,
    params_ignored,
    hooks_lost,
    unused_parameters,
    update_skipped_on_one_rank,
)


def _otherwise_explained(evidence: Evidence) -> bool:
    rules = (structure_differs, *_BEFORE_BACKWARD_IS_OVER)
    return any(rule(evidence) for rule in rules)


def _unless_all(ranks: list[int], unequal: Unequal) -> tuple[int, ...]:
    return () if len(ranks) == len(unequal.windows) else tuple(ranks)


def _first(window: Event, name: str) -> str | None:
    return next(iter(window.get(name, ())), None)


def _last(window: Event, name: str) -> str | None:
    found = [place for place in window.get(name, ()) if place]
    return found[-1] if found else None


def _wrapped_at(evidence: Evidence, unequal: Unequal, name: str) -> str | None:
    module = unequal.held[name].module
    for event in evidence.events("wrap", evidence.ranks[0]):
        if event["module"] == module:
            return str(event["at"]) if event["at"] else None
    return None
