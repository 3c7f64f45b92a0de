"""Parameters that have no hook of the wrapper above them."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.causes.unequal import unequal_gradients
from harness.watch.evidence import Evidence
from harness.watch.journal import Event


def _without_hook(
    evidence: Evidence, was: str, because: str, *, all_of_them: bool = False
) -> Diagnosis | None:
    """Recognise unequal gradients of parameters that were something else to the wrapper.

    Args:
        evidence: what is known of the run.
        was: what they were when the wrapper was made: absent, frozen or ignored.
        because: a sentence with a place for their names.
        all_of_them: nothing is concluded where other gradients differ as well.
    """
    unequal = unequal_gradients(evidence)
    if unequal is None:
        return None
    names = [one.name for one in unequal.owned if one.was == was]
    if not names or (all_of_them and len(names) < len(unequal.names)):
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(because.format(listed(names)),),
        where=unequal.wrapped_at(names[0]),
        tensor=names[0],
    )


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
    return _without_hook(evidence, "absent", "not there when the model was wrapped: {}")


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
    said = "requires_grad was False when the model was wrapped: {}"
    return _without_hook(evidence, "frozen", said)


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
    said = "the wrapper was told to ignore {}"
    return _without_hook(evidence, "ignored", said, all_of_them=True)


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
    module = None if unequal is None else unequal.hooked
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
        ranks=unequal.unless_all(ranks),
    )
