"""Clips that see other gradients than the update is made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.causes.across import Side, each_rank, same, side_by_side
from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence
from harness.watch.journal import Event
from harness.watch.layout import GRADIENTS

_MOST_BOUND = 0.01
"""A bound of more than this share of the loss scale was multiplied by it."""
_FEWEST = 3
"""Updates from which on a place in the loop is a habit."""


@cause(
    family="clipping",
    sees="Training depends on the number of GPUs as soon as clipping acts; replicas stay equal.",
    why="Each rank clips its own gradient, and the average comes after: a mean of clipped "
    "gradients is not the clipped mean.",
    confirm="Print the norm that clip_grad_norm_ returns: it must be the same on all ranks.",
    change="clip after the gradients are averaged, once per update",
    fix="""
loss.backward()                    # DDP averages here, unless inside no_sync
if last_micro_batch:
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
""",
)
def clip_before_average(evidence: Evidence) -> Diagnosis | None:
    """Recognise norms that differ between ranks where those of the updates do not."""
    for side in side_by_side(evidence, "clip", "optimizer", "update"):
        if not all(e.get("norm") and e["shards"] is None for e in side.values()):
            continue
        # Replicas that were averaged have the same bits.
        if not same(e["norm"] for e in side.values()) or not same(
            len(e["clips"]) for e in side.values()
        ):
            continue
        first: Event = next(iter(side.values()))
        for place, clip in enumerate(first["clips"]):
            norms = {rank: event["clips"][place]["norm"] for rank, event in side.items()}
            if clip["kind"] != "norm" or clip["sharded"] or None in norms.values():
                continue
            apart = max(norms.values()) - min(norms.values())
            acts = clip["bound"] is not None and max(norms.values()) > clip["bound"]
            if acts and apart > 1e-5 * max(norms.values()):
                return Diagnosis(
                    strength=Strength.PROVEN,
                    because=(
                        f"clip_grad_norm_ saw norm {each_rank(norms, '{:.4g}'.format)} and cut at "
                        f"{clip['bound']:g}; the gradients of the update were the same on all",
                    ),
                    where=clip["at"],
                    step=first["update"],
                    explains=False,
                )
    return None


@cause(
    family="clipping",
    sees="Almost nothing is learned with mixed precision and clipping, or only with Adam.",
    why="The gradients still carry the loss scale when they are clipped, so that nearly all "
    "exceed the bound; the scale is divided out afterwards.",
    confirm="Print the norm that clip_grad_norm_ returns, and scaler.get_scale().",
    change="call scaler.unscale_(optimizer) before clipping",
    fix="""
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), max_norm)
scaler.step(optimizer)
scaler.update()
""",
    reported=("milesial/Pytorch-UNet#468", "rwth-i6/returnn#1590", "pytorch/examples#1196"),
)
def clip_before_unscale(evidence: Evidence) -> Diagnosis | None:
    """Recognise a clip between scale and unscale_, with a bound that is not scaled."""
    for event in evidence.events("clip"):
        for clip in event["clips"]:
            scale, bound = clip["scale"], clip["bound"]
            if not scale or scale <= 1.0 or bound is None or bound > _MOST_BOUND * scale:
                continue
            norm = clip["norm"]
            saw = "" if norm is None else f"saw norm {norm:.4g}, {norm / scale:.4g} without it, "
            return Diagnosis(
                strength=Strength.PROVEN,
                because=(
                    f"the gradients carried the loss scale {scale:g} when they were clipped: the "
                    f"clip {saw}and cut at {bound:g}",
                ),
                where=clip["at"],
                step=event["update"],
                explains=False,
            )
    return None


@cause(
    family="clipping",
    sees="Clipping changes nothing, whatever the bound; losses jump as they did without it.",
    why="The gradients are clipped when the update has been made from them, and are cleared or "
    "added to afterwards.",
    confirm="Set the bound to 1e-9: the loss still falls.",
    change="clip between backward and optimizer.step()",
    fix="""
loss.backward()
clip_grad_norm_(model.parameters(), max_norm)      # before step
optimizer.step()
optimizer.zero_grad()
""",
)
def clip_after_step(evidence: Evidence) -> Diagnosis | None:
    """Recognise clips with no backward pass between the update before and them."""
    for rank in evidence.ranks:
        # With several optimizers, the update before may be the other one's.
        if {u["optimizer"] for u in evidence.updates(rank)} != {0}:
            continue
        windows = {u["update"]: u for u in evidence.updates(rank) if u.get("backwards")}
        events = [e for e in evidence.events("clip", rank) if e["update"] in windows]
        late = [e for e in events if all(c.get("backwards") == 0 for c in e["clips"])]
        if len(late) < _FEWEST or len(late) < len(events) or not any(map(_cuts, late)):
            continue
        clip = late[0]["clips"][0]
        return Diagnosis(
            strength=Strength.PROVEN,
            because=(
                f"gradients were clipped after the update that was made from them, and before the "
                f"next backward pass ({len(late)} of {len(events)} updates that were looked at)",
            ),
            where=clip["at"],
            step=late[0]["update"] - 1,
            explains=False,
        )
    return None


def _cuts(event: Event) -> bool:
    """Say whether a clip is one, and not a look at the norm."""
    return any(clip["kind"] == "value" or _acts(clip) for clip in event["clips"])


@cause(
    family="clipping",
    sees="The logged gradient norm differs between ranks; clipping acts differently on each.",
    why="Each rank has a part of the gradients, of FSDP's making or by hand, and "
    "torch.nn.utils.clip_grad_norm_ was given plain tensors: it takes the norm of that part for "
    "the whole.",
    confirm="Print the norm on each rank: it must be the same, and that of one process.",
    change="clip with the FSDP wrapper's method, or pass the DTensors themselves",
    fix="""
model.clip_grad_norm_(max_norm)                            # FSDP1
norm = clip_grad_norm_(model.parameters(), max_norm)       # fully_shard: parameters as they are
norm = norm.full_tensor()                                  # for the log
""",
    reported=("pytorch/pytorch#72548", "pytorch/torchtitan#766"),
)
def clip_norm_of_shards(evidence: Evidence) -> Diagnosis | None:
    """Recognise norms of parts: sharded parameters, and a plain result that differs."""
    for side in side_by_side(evidence, "clip", "optimizer", "update"):
        made_by_hand = _parts_that_part(evidence, side)
        if not made_by_hand and not all(e.get("shards") for e in side.values()):
            continue
        clips = {rank: event["clips"][0] for rank, event in side.items()}
        norms = {rank: clip["norm"] for rank, clip in clips.items()}
        plain = all(c["kind"] == "norm" and not c["sharded"] for c in clips.values())
        if plain and None not in norms.values() and not same(norms.values()):
            first = next(iter(clips.values()))
            return Diagnosis(
                strength=Strength.PROVEN,
                because=(f"clip_grad_norm_ of shards gave {each_rank(norms, '{:.4g}'.format)}",),
                where=first["at"],
                step=next(iter(side.values()))["update"],
                explains=made_by_hand,
            )
    return None


def _parts_that_part(evidence: Evidence, side: Side) -> bool:
    """Say whether an optimizer holds parts, and its replicas part in the update of these clips."""
    window, parted = next(iter(side.values())), evidence.divergence
    return (
        parted is not None
        and parted.phase == GRADIENTS
        and (evidence.optimizer, parted.step) == (window["optimizer"], window["update"])
        and bool(evidence.parts.get(window["optimizer"]))
        and all(_acts(event["clips"][0]) for event in side.values())
    )


def _acts(clip: Mapping[str, Any]) -> bool:
    return bool(clip["norm"] and clip["bound"] and clip["norm"] > clip["bound"])
