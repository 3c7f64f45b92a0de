"""Runs the programs without a watcher and writes down what every update left behind.

python -m tests.watched.programs.bare OUT --worlds 1 3 [--seeds 0] [--only NAME ...]

Ranks are forked from one process: importing torch takes longer than most programs. All programs
share the ranks of a world size; those that hang get ranks of their own, with nobody else in them.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import io
import os
import random
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

FOLDER = Path(__file__).parent
PACKAGE = "tests.watched.programs"
RIGHT = sorted(path.stem for path in FOLDER.glob("right_*.py"))
WRONG = sorted(path.stem for path in FOLDER.glob("wrong_*.py"))
STATED = ("CAUSE", "EXPECTED", "HANGS")
PATIENCE = 200.0
"""Seconds that ranks get at most; a hang ends by the programs' own timeouts long before."""


def module(name):
    return importlib.import_module(f"{PACKAGE}.{name}")


@functools.cache
def stated(name):
    """Return the constants in which a faulty program says what is wrong, without importing it."""
    found = {"HANGS": False}
    for node in ast.parse((FOLDER / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Assign) and (title := node.targets[0].id) in STATED:
            found[title] = ast.literal_eval(node.value)
    return found


def hangs(name):
    return stated(name)["HANGS"]


class Recorder:
    """Gradients before and values after each update, in the order of the updates."""

    def __init__(self):
        self.updates = []
        self.masks = []
        self.evaluated = None
        self._running = []
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
            register_module_forward_hook(self._forward),
        ]

    def close(self):
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer, *_):
        self._running.append(optimizer)
        if len(self._running) == 1:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            grads = [None if p.grad is None else copy_of(p.grad) for p in held]
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            before = [copy_of(p) for p in held]
            row = {"held": held, "before": before, "grads": grads, "lr": rates, "values": None}
            self.updates.append(row)

    def _after(self, optimizer, *_):
        self._running.pop()
        if not self._running:
            update = self.updates[-1]
            update["values"] = [copy_of(p) for p in update["held"]]

    def _forward(self, module, args, output):
        if not module.training and self.updates and self.evaluated is None:
            self.evaluated = len(self.updates)
        if type(module) is nn.Dropout and module.training and module.p > 0:
            self.masks.append((output == 0).flatten()[:64].clone())

    def named(self, model):
        """Return the updates with the names that the returned model has for its parameters."""
        names = {}
        for name, parameter in model.named_parameters():
            names[id(parameter)] = name.replace("module.", "")
        rows = []
        for update in self.updates:
            held = [names.get(id(p), f"parameter {i}") for i, p in enumerate(update["held"])]
            row = {"lr": update["lr"]}
            for kind in ("before", "grads", "values"):
                row[kind] = dict(zip(held, update[kind] or [None] * len(held), strict=True))
            rows.append(row)
        return rows


def copy_of(tensor):
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return tensor.to_dense() if tensor.is_sparse else tensor.clone()


def whole(tensor):
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


def run(name, arguments):
    """Run one program in this rank; what it changes in the process is put back."""
    recorder, hook, folder = Recorder(), sys.excepthook, Path.cwd()
    random.seed(0)
    torch.manual_seed(0)
    result = {"error": None, "where": None, "metrics": {}, "final": {}}
    began = time.perf_counter()
    model = nn.Module()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model, result["metrics"] = module(name).main(arguments)
        with torch.no_grad():
            state = {n.replace("module.", ""): whole(t) for n, t in model.state_dict().items()}
        result["final"] = state
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {str(error)[:400]}"
        frames = traceback.extract_tb(error.__traceback__)
        result["where"] = [f.line for f in frames if f.filename == module(name).__file__][-1]
        traceback.print_exc()
    finally:
        recorder.close()
        os.chdir(folder)
        sys.excepthook = hook
    return result | {
        "seconds": time.perf_counter() - began,
        "updates": recorder.named(model),
        "parameters": [name.replace("module.", "") for name, _ in model.named_parameters()],
        "masks": recorder.masks,
        "evaluated": recorder.evaluated,
    }


def together(names, seed, path):
    """Run the programs one after another in one process group; one process runs no faulty arm."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    results = {}
    for name in names:
        arms = [["--fixed"]] if name in WRONG else [[]]
        if name in WRONG and not hangs(name) and dist.get_world_size() > 1:
            arms.append([])
        for arm in arms:
            results[" ".join([name, *arm])] = run(name, ["--seed", str(seed), *arm])
            dist.barrier()
    torch.save(results, path)


def alone(name, seed, path):
    """Run one program that makes its own process group, which it may leave in a bad state."""
    torch.save({name: run(name, ["--seed", str(seed)])}, path)


def forked(target, world, folder, *arguments):
    """Start ranks in the environment that torchrun gives; return rank -> process id."""
    folder.mkdir(parents=True)
    with socket.socket() as held:
        held.bind(("localhost", 0))
        port = held.getsockname()[1]
    started = {}
    for rank in range(world):
        pid = os.fork()
        if pid:
            started[rank] = pid
            continue
        code = 1
        try:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
            target(*arguments, folder / f"rank{rank}.pt")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            # Without teardown: gloo's threads may abort an interpreter that is shutting down.
            os._exit(code)
    return started


def awaited(started):
    """Wait for ranks; return rank -> exit code, negative for a signal."""
    codes = {}
    deadline = time.monotonic() + PATIENCE
    for rank, pid in started.items():
        done, status = os.waitpid(pid, os.WNOHANG)
        while not done and time.monotonic() < deadline:
            time.sleep(0.05)
            done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            os.kill(pid, 9)
            _, status = os.waitpid(pid, 0)
        codes[rank] = os.waitstatus_to_exitcode(status)
    return codes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=RIGHT + WRONG)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as elsewhere:
        os.environ["TMPDIR"] = elsewhere
        tempfile.tempdir = elsewhere
        for name in args.only:
            module(name)
        # What the first optimizer of a process imports: once, and not in every rank.
        importlib.import_module("torch._dynamo")
        ends = {}
        for seed in args.seeds:
            waiting = {}
            for world in args.worlds:
                for name in args.only:
                    if world > 1 and name in WRONG and hangs(name):
                        folder = args.out / f"seed{seed}-world{world}-{name}"
                        waiting[folder.name] = forked(alone, world, folder, name, seed)
                folder = args.out / f"seed{seed}-world{world}"
                waiting[folder.name] = forked(together, world, folder, args.only, seed)
                # Hangs cost waiting, not work; the rest one world size after another.
                ends[folder.name] = awaited(waiting.pop(folder.name))
            ends |= {title: awaited(started) for title, started in waiting.items()}
    torch.save(ends, args.out / "ends.pt")


if __name__ == "__main__":
    main()
