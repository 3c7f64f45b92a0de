"""The watcher as a stranger has it: the wheel beside torch, in an empty folder, nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.test_wheel import ROOT, call, wheel  # noqa: F401
from tests.watching import ALONE

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Linear(6, 3)
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(5):
    forward = net if sys.argv[1] == "wrong" and step >= 2 else model
    forward(torch.randn(4, 6, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
print(sorted({"hydra", "omegaconf", "pandas", "numpy", "pyarrow"} & set(sys.modules)))
"""


def required(name, found):
    """Add the distribution and, as its metadata has it, all that it cannot do without."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # Meant for another platform or another Python.
    key = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
    if key in found:
        return
    found[key] = distribution
    for line in distribution.requires or ():
        if "extra ==" not in line:
            required(re.match(r"[\w.-]+", line)[0], found)


@pytest.fixture(scope="module")
def stranger(wheel, tmp_path_factory):  # noqa: F811
    """An environment with the wheel and torch; torch is linked, as it is too large to copy."""
    folder = tmp_path_factory.mktemp("stranger")
    call(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    install = ["-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    call(sys.executable, *install, wheel, cwd=folder)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    found: dict[str, importlib.metadata.Distribution] = {}
    required("torch", found)
    assert not {"numpy", "pandas", "hydra-core", "omegaconf"} & set(found)
    for distribution in found.values():
        for top in {path.parts[0] for path in distribution.files or ()} - {".."}:
            source = Path(str(distribution.locate_file(top)))
            if not (packages / top).exists() and top != "__pycache__":
                (packages / top).symlink_to(source)
    (folder / "empty").mkdir()
    return python, folder / "empty"


def run(stranger, *words):
    python, empty = stranger
    kept = {name: value for name, value in os.environ.items() if name not in ALONE}
    kept.pop("PYTHONPATH", None)
    return subprocess.run(
        [str(python), "-W", "ignore", *map(str, words)],
        cwd=empty,
        env=kept | {"OMP_NUM_THREADS": "1", "TMPDIR": str(empty)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def watch(stranger, word):
    _, empty = stranger
    (empty / "train.py").write_text(textwrap.dedent(SCRIPT))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--json", "watch.json", "--html", "watch.html"]
    ended = run(stranger, *launch, "-m", "harness.watch", *options, "train.py", word)
    return ended, json.loads((empty / "watch.json").read_text())


def test_a_right_script_is_watched_with_torch_alone(stranger):
    ended, answer = watch(stranger, "right")
    assert ended.returncode == 0, ended.stderr
    # The ranks share a stream, and a line and its end may be parted by the other's.
    assert sorted(ended.stdout) == sorted("[]\n[]\n")
    assert answer["headline"] == "no divergence: 2 replicated parameters, 5 updates, 2 ranks"
    assert not any("stopped watching" in note for note in answer["notes"]), answer["notes"]


def test_a_wrong_script_is_diagnosed_and_has_its_page(stranger):
    ended, answer = watch(stranger, "wrong")
    assert ended.returncode == 1, "torchrun makes 1 of every other code"
    assert answer["exit_code"] == 20
    assert answer["diagnoses"][0]["cause"] == "ddp_forward_bypassed"
    assert answer["headline"].startswith("step 2: ranks 0 and 1 differ in gradient")
    assert "ddp_forward_bypassed" in (stranger[1] / "watch.html").read_text()


def test_causes_are_listed_and_explained(stranger):
    listed = run(stranger, "-m", "harness.watch", "causes")
    assert listed.returncode == 0, listed.stderr
    assert "ddp_forward_bypassed" in listed.stdout
    explained = run(stranger, "-m", "harness.watch", "explain", "ddp_forward_bypassed")
    assert explained.returncode == 0, explained.stderr
    assert "call the wrapper" in explained.stdout


def test_the_environment_has_nothing_else(stranger):
    program = (
        "import importlib.util as u, sys, harness; print(harness.__file__)\n"
        "print([n for n in ('hydra', 'omegaconf', 'pandas', 'numpy', 'tests') if u.find_spec(n)])"
    )
    file, others = run(stranger, "-c", program).stdout.splitlines()
    assert not Path(file).is_relative_to(ROOT)
    assert others == "[]"
