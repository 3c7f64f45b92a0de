"""Runs every framework that is installed, bare and watched, right and broken, in one set of ranks.

python -m torch.distributed.run --nproc-per-node=2 -m tests.watched.frameworks.driver OUT NAME...
"""

import hashlib
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.watch.answers.closing import answer
from harness.watch.watcher import Watcher


def lightning(out, fault, told):
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from tests.watched.frameworks import lightning_fit

    loggers = [CSVLogger(out, name="csv", version=0)]
    if fault == "none":
        loggers.append(TensorBoardLogger(out, name="board", version=0))
    model = lightning_fit.fit(out, fault, loggers=loggers)
    if dist.get_rank() == 0:
        told["log"] = (out / "csv" / "version_0" / "metrics.csv").read_text()
    return model


def transformers(out, fault, told):
    from tests.watched.frameworks import transformers_train

    report_to = ["tensorboard"] if fault == "none" else []
    model, history = transformers_train.train(out, fault, report_to=report_to)
    told["masks"] = model.masks
    # How long something took is another number each time.
    timed = ("runtime", "per_second")
    told["log"] = [{k: v for k, v in e.items() if not k.endswith(timed)} for e in history]
    return model


def accelerate(out, fault, told):
    from accelerate.commands.launch import launch_command_parser

    from tests.watched.frameworks import accelerate_loop

    typed = ["--num_processes", "2", "-m", "harness.watch", "--quiet", "train.py", "--lr", "1"]
    read = launch_command_parser().parse_args(typed)
    told["launched"] = [read.module, read.training_script, *read.training_script_args]
    return accelerate_loop.loop(out, fault, log_with=["tensorboard"] if fault == "none" else [])


FRAMEWORKS = {"lightning": lightning, "transformers": transformers, "accelerate": accelerate}


def scalars(out):
    """Return all that was written for TensorBoard: tag -> steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for folder in sorted({path.parent for path in out.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(folder)).Reload()
        for tag in events.Tags()["scalars"]:
            if not tag.endswith(("runtime", "per_second")):
                found[tag] = [(one.step, one.value) for one in events.Scalars(tag)]
    return found


def run(out, framework, fault, watched):
    told = {}
    watcher = Watcher(folder=str(out / "meets")) if watched else None
    try:
        model = FRAMEWORKS[framework](out, fault, told)
        if watcher is not None:
            given = answer(watcher, script_code=0)
            told["failed"] = watcher.failed
            told["answer"] = None if given is None else given.to_json()
    finally:
        if watcher is not None:
            watcher.close()
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for name, tensor in model.state_dict().items():
        state.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    told["state"] = state.hexdigest()
    dist.barrier()
    if fault == "none" and dist.get_rank() == 0:
        told["scalars"] = scalars(out)
    return told


def main():
    out, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        framework, fault, kind = name.split("-")
        try:
            told = run(out / name, framework, fault, kind == "watched")
        except Exception:
            told = {"raised": traceback.format_exc()}
        (out / f"{name}.rank{dist.get_rank()}.json").write_text(json.dumps(told))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
