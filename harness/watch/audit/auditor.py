"""Audits every n-th update of each optimizer; the last rank to come compares, and nobody waits."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from harness.watch.audit.contribution import Contribution, contribution
from harness.watch.audit.examination import examine
from harness.watch.audit.forward_pass import version
from harness.watch.audit.recorder import NAME, Recorder
from harness.watch.audit.replay import Name
from harness.watch.instruments.context import Context
from harness.watch.meeting.folder import Folder
from harness.watch.modules import parameters_of

_SHARDED = ("_fsdp_flattened", "placements")
"""Attributes of parts; those of FSDP1 are of the type of any other parameter."""
_COMPRESSION = {
    "allreduce_hook": 0.0,
    "fp16_compress_hook": torch.finfo(torch.float16).eps,
    "bf16_compress_hook": torch.finfo(torch.bfloat16).eps,
}
"""Communication hooks -> epsilon of what they send."""
_EARLY = 8
"""Updates after a module was wrapped in which its optimizer is expected to make its first one."""
_AVERAGING = ("PostLocalSGDOptimizer",)


class Auditor:
    """Audits this rank's part of every n-th update."""

    def __init__(self, context: Context, every: int) -> None:
        """Begin with the first update of each optimizer."""
        self._context = context
        self._every = every
        self._recorder = Recorder(context)
        self._due: dict[int, int] = {}
        """Optimizer -> its next update to be audited."""
        self._next: dict[int, int] = {}
        self._holders: dict[int, set[int]] = {}
        self._updates = 0
        self._early = _EARLY
        self._began = time.perf_counter()
        self._recorder.arm(True)

    def close(self) -> None:
        """Remove every hook."""
        self._recorder.close()

    def wrapped(self, inner: nn.Module) -> None:
        """Listen to a module that is being wrapped."""
        self._recorder.add(inner, averaged=True)
        self._early = self._updates + _EARLY
        self._recorder.arm(True)

    def before_update(
        self,
        number: int,
        optimizer: Optimizer,
        update: int,
        *,
        folder: Folder,
        rank: int,
        peers: Sequence[int],
        world_size: int,
    ) -> None:
        """Write what this rank has to contribute; compare if it is the last one."""
        self._context.safely(NAME, self._audit)(
            number, optimizer, update, folder, rank, peers, world_size
        )

    def _audit(
        self,
        number: int,
        optimizer: Optimizer,
        update: int,
        folder: Folder,
        rank: int,
        peers: Sequence[int],
        world_size: int,
    ) -> None:
        began = time.perf_counter()
        held = set(map(id, parameters_of(optimizer)))
        listened = len(self._recorder.holders)
        known = self._known(held)
        self._holders[number] = known
        due = self._due.setdefault(number, update)
        if update < due:
            return
        if len(self._recorder.holders) > listened:
            # Without a wrapper, a module is known only once its parameters are about to be updated.
            self._due[number] = update + 1
            return
        self._due[number] = (update // self._every + 1) * self._every
        parameters = self._parameters(known, held)
        eps = [torch.finfo(p.dtype).eps for p in parameters.values()]
        eps += [_COMPRESSION.get(hook, 0.0) for hook in self._hooks(known)]
        reasons = self._reasons(optimizer, known, held, update)
        if len(peers) < world_size:
            reasons.append("ranks of other hosts write elsewhere; type --folder")
        checksum = 0.0 if reasons else _checksum(parameters)
        mine = contribution(self._recorder, known, reasons, checksum)
        mine.write(folder.audit(number, update, rank))
        paths = {peer: folder.audit(number, update, peer) for peer in peers}
        if all(path.exists() for path in paths.values()) and folder.claim(
            f"audit{number}.{update}"
        ):
            everyone = {peer: Contribution.read(path) for peer, path in paths.items()}
            for path in paths.values():
                path.unlink()
            before, self._context.closed = self._context.closed, True
            try:
                found = examine(
                    everyone,
                    {n: self._recorder.holders[n].module for n in known},
                    self._gradients(parameters, self._recorder.after_backward),
                    self._gradients(parameters, self._recorder.before_clip),
                    coarsest=max(eps, default=0.0),
                    world_size=world_size,
                )
            finally:
                self._context.closed = before
            self._context.journal.write("audit", optimizer=number, update=update, **found)
        ended = time.perf_counter()
        self._context.journal.write(
            "audit cost",
            optimizer=number,
            update=update,
            milliseconds=round(1000 * (ended - began), 3),
            elapsed=round(ended - self._began, 3),
        )

    def after_update(self, number: int, update: int) -> None:
        """Make room for what comes next, and listen only if that is audited."""
        self._next[number] = update + 1
        self._recorder.forget(self._holders.get(number, set()))
        self._updates += 1
        due = any(self._next.get(n, due) >= due for n, due in self._due.items())
        self._recorder.arm(due or self._more_to_come())

    def _more_to_come(self) -> bool:
        """Say whether a module is still without an optimizer: that of a second model, perhaps."""
        with_one = set().union(*self._holders.values())
        return self._updates < self._early and len(with_one) < len(self._recorder.holders)

    def _known(self, held: set[int]) -> set[int]:
        """Return the numbers of the modules that hold these parameters, new ones included."""
        for root in self._context.modules.roots():
            if isinstance(root, DistributedDataParallel):
                self._recorder.add(root.module, averaged=True)
            elif any(id(p) in held for p in root.parameters()):
                inner = {id(holder.reference()) for holder in self._recorder.holders}
                # A container whose parts are wrapped is not called itself.
                if not any(id(part) in inner for part in root.modules()):
                    self._recorder.add(root, averaged=False)
        return {
            number
            for number, holder in enumerate(self._recorder.holders)
            if any(id(p) in held for p in holder.parameters())
        }

    def _parameters(self, known: set[int], held: set[int]) -> dict[Name, nn.Parameter]:
        return {
            (number, name): parameter
            for number in sorted(known)
            for name, parameter in self._recorder.holders[number].module.named_parameters()
            if id(parameter) in held
        }

    def _reasons(
        self, optimizer: Optimizer, known: set[int], held: set[int], update: int
    ) -> list[str]:
        found = []
        if not known:
            found.append("the parameters of the optimizer are in no module that is known")
        parameters = parameters_of(optimizer)
        if type(optimizer).__name__ in _AVERAGING:
            found.append("replicas differ on purpose between averages")
        if any(hasattr(p, mark) for p in parameters for mark in _SHARDED):
            return [*found, "parameters are sharded (FSDP or tensor parallel)"]
        unknown = [hook for hook in self._hooks(known) if hook not in _COMPRESSION]
        if unknown:
            found.append(f"a communication hook changes the gradients ({unknown[0]})")
        for number in sorted(known):
            holder = self._recorder.holders[number]
            now = version(holder.module)
            passes = [p for p in self._recorder.passes if p.holder == number and p.gradients]
            if any(one.version != now for one in passes):
                found.append("parameters were written to between the forward pass and the update")
            if holder.kept_gradient:
                found.append("the gradients of an earlier update were not cleared before it")
        return list(dict.fromkeys(found))

    def _gradients(
        self, parameters: dict[Name, nn.Parameter], taken: dict[int, torch.Tensor]
    ) -> dict[Name, torch.Tensor | None]:
        """Return gradients as they were when they were taken, else as they are now."""
        found = {name: taken.get(id(p), p.grad) for name, p in parameters.items()}
        return {
            name: g.to_dense() if g is not None and g.is_sparse else g for name, g in found.items()
        }

    def _hooks(self, known: set[int]) -> list[str]:
        """Return the names of the communication hooks of the wrappers."""
        roots = [self._recorder.holders[number].module for number in known]
        wrappers = [reference() for reference in self._context.wrappers.values()]
        mine = [w for w in wrappers if w is not None and any(w.module is r for r in roots)]
        hooks = [hook for wrapper in mine for hook, _ in getattr(wrapper, "_comm_hooks", ())]
        return [getattr(hook, "__name__", repr(hook)) for hook in hooks]


def _checksum(parameters: dict[Name, nn.Parameter]) -> float:
    with torch.no_grad():
        sums = [getattr(p, "_local_tensor", p).double().sum() for p in parameters.values()]
        return float(torch.stack(sums).sum()) if sums else 0.0
