"""Trains each case bare and watched, in real ranks, and says whether every bit is the same.

python -m torch.distributed.run --nproc-per-node=2 -m tests.watched.invisible OUT
"""

import copy
import gc
import hashlib
import json
import logging
import os
import pickle
import random
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np

# Or the record of all cases is read again at the end of each.
os.environ["TORCH_FR_BUFFER_SIZE"] = "256"
import torch

BEFORE = set(sys.modules)

import torch.distributed as dist  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

from harness.watch.answers.closing import close  # noqa: E402
from harness.watch.audit import examination  # noqa: E402
from harness.watch.hangs import stall  # noqa: E402
from harness.watch.starting.observing import begin  # noqa: E402
from harness.watch.starting.options import parse  # noqa: E402
from harness.watch.watcher import WATCHERS  # noqa: E402

OF_THE_WATCHER = sorted(set(sys.modules) - BEFORE)
"""What a script has imported without knowing it, besides torch."""

from tests.watched.trainings import CASES, MASKS  # noqa: E402

MODES = {"watched": [], "audited": ["--audit", "every=2"], "recorded": ["--record", "RECORD"]}
CONTROLS = ("draws_a_number", "writes_a_bit", "leaves_a_trace")
"""Clumsy watchers: they show that the comparison can see it."""


def state(result):
    """Everything that a run leaves behind, each as a hash of its bytes."""
    losses, models, optimizers = result
    kept = {
        "losses": losses,
        "masks": list(MASKS),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": str(np.random.get_state()),
    }
    for number, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            kept[f"model {number} {name}"] = tensor
            kept[f"grad {number} {name}"] = tensor.grad
    for number, optimizer in enumerate(optimizers):
        settings = [{**group, "params": None} for group in optimizer.param_groups]
        kept[f"groups {number}"] = settings
        states = [values for values in optimizer.state.values() if values]
        for index, values in enumerate(states):
            kept.update({f"state {number} {index} {key}": value for key, value in values.items()})
    return {name: hashed(value) for name, value in kept.items()}


def hashed(value):
    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()


def plain(value):
    value = getattr(value, "_local_tensor", value)
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, value.shape, bytes(raw.tolist())
    if isinstance(value, dict):
        return [(key, plain(one)) for key, one in value.items()]
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def visible(result):
    """What a program can see of its models and optimizers without looking for a watcher."""
    _, models, optimizers = result
    seen = {}
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            # Python itself keeps the slots of a class with it, once one of its objects is copied.
            names = [one for one in dir(module) if one != "__slotnames__"]
            about = [type(module).__name__, sorted(vars(module)), names]
            seen[f"attributes of {number} {name}"] = repr(about)
        for name, parameter in model.named_parameters():
            hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            seen[f"hooks of {number} {name}"] = repr([len(one or ()) for one in hooks])
            seen[f"parameter {number} {name}"] = repr(sorted(vars(parameter)))
        seen[f"state_dict {number}"] = repr(list(model.state_dict()))
        inner = getattr(model, "module", model)
        for what, act in {
            "copied": copy.deepcopy,
            "pickled": lambda one: pickle.loads(pickle.dumps(one)),
        }.items():
            seen[f"{what} {number}"] = attempt(lambda a=act, m=inner: hashed(a(m).state_dict()))
            seen[f"{what} whole {number}"] = attempt(lambda a=act, m=model: vars(a(m)).keys())
    for number, optimizer in enumerate(optimizers):
        seen[f"attributes of optimizer {number}"] = repr(sorted(vars(optimizer)))
        keys = attempt(lambda one=optimizer: repr(one.state_dict().keys()))
        seen[f"state_dict of optimizer {number}"] = keys
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        seen[f"hooks of optimizer {number}"] = repr([len(one) for one in hooks])
    return seen


def attempt(act):
    try:
        return str(act())
    except Exception as error:
        return type(error).__name__


def surroundings():
    """What a program can see of the process."""
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "modes": [torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()],
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "generator": id(torch.default_generator),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "excepthook": id(sys.excepthook),
        "signals": repr([signal.getsignal(one) for one in sorted(signal.valid_signals())]),
        "filters": len(warnings.filters),
        "loggers": repr(logging.getLogger().handlers),
        "environment": hash(frozenset(os.environ.items())),
        "collector": [gc.isenabled(), gc.get_threshold()],
        "folder": str(Path.cwd()),
        "path": sys.path[:],
        "seconds between ticks": sys.getswitchinterval(),
    }


def train(name):
    """Train a case; return its bits, and what it could see while it was still watched."""
    torch.manual_seed(7 + dist.get_rank())
    random.seed(7 + dist.get_rank())
    np.random.seed(7 + dist.get_rank())
    MASKS.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = CASES.get(name, CASES["sgd_momentum"])()
        bits = state(result)
        seen = visible(result) | {f"process: {k}": repr(v) for k, v in surroundings().items()}
    # On Python 3.13.0 torch.compile says the same of every guard, and hooks are guarded, too.
    said = [
        f"{one.filename}:{one.lineno}: {one.category.__name__}: {one.message}" for one in caught
    ]
    said = sorted(one for one in said if "Guards may run slower" not in one)
    return bits, seen | {"warnings": repr(said)}


def watch(name, out, words):
    """Train a case as `python -m harness.watch` would."""
    words = [str(out / f"{name}.record") if word == "RECORD" else word for word in words]
    watcher = begin(parse(["--folder", str(out / name), *words, "train.py"]))
    handle = None
    if name == "draws_a_number":
        watcher.meet = lambda meet=watcher.meet: (torch.rand(1), meet())
    if name == "writes_a_bit":

        def write(optimizer, args, kwargs):
            first = optimizer.param_groups[0]["params"][0]
            first.detach().view(torch.int32)[0, 0] ^= 1

        handle = register_optimizer_step_post_hook(write)
    if name == "leaves_a_trace":

        def trace(optimizer, args, kwargs):
            optimizer.param_groups[0]["params"][0].watched = True
            torch.set_grad_enabled(False)
            torch.set_grad_enabled(True)
            warnings.warn("watched", stacklevel=1)

        handle = register_optimizer_step_post_hook(trace)
    try:
        bits, seen = train(name)
    finally:
        if handle:
            handle.remove()
        code = close(watcher, script_code=0, quiet=True)
        del WATCHERS[os.getpid()]
    saw = {
        "code": code,
        "failed": watcher.failed,
        "notes": watcher.notes,
        "optimizers": watcher.updates.summary(),
        "thread": watcher.stall._thread is not None,
    }
    return bits, seen, saw


def differing(one, other):
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def compare(name, out):
    began = time.process_time()
    # The first run of a kind imports and warns as later ones do not.
    warm, _ = train(name)
    bare, seen = train(name)
    compared = {"things": len(bare), "repeatable": warm == bare, "modes": {}}
    for mode, words in MODES.items():
        if name in CONTROLS and mode != "watched":
            continue
        modules = set(sys.modules)
        bits, now_seen, saw = watch(name, out / mode, words)
        compared["modes"][mode] = saw | {
            "different": differing(bare, bits),
            "seen": differing(seen, now_seen),
            "imported": sorted(set(sys.modules) - modules),
        }
        dist.barrier()
    return compared | {"seconds": time.process_time() - began}


def main():
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    # The thread that looks for hangs sleeps longer than these cases take.
    stall.TICK, stall.LOOK = 0.05, 0.0
    examination.SECONDS = 0.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {"imported": OF_THE_WATCHER, "cases": {}}
    for name in sys.argv[2:] or [*CASES, *CONTROLS]:
        results["cases"][name] = compare(name, out)
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
