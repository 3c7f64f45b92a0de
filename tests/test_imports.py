"""What may import what, proved at run time and by reading the sources of whatever modules exist."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "hydra", "omegaconf", "pandas", "pyarrow", "wandb")
SCENARIOS = sorted(path.stem for path in (ROOT / "scenarios").glob("[!_]*.py"))
"""Those of this repository: the tests put a folder of their own beside it."""
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "scenarios").rglob("*.py")
    if path.name != "__init__.py"
)
"""They and what they are made of."""
LIGHT = ["scenarios", "harness.verdict", "harness.tables", "harness.record", "harness.floor"]
"""With all scenarios: what lists, validates and judges."""
RANKS = ["launch.rank", "launch.preload"]
"""With all scenarios: what a rank or the server it is forked from imports."""


def loaded(modules: list[str]) -> set[str]:
    """Return the top-level names in sys.modules after importing `modules` in a fresh process."""
    program = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    return set(json.loads(answer.stdout))


def imports(module: str) -> set[str]:
    """Return every module that a scenario names in an import, at any depth of its code."""
    path = ROOT / module.replace(".", "/")
    tree = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{module} has a relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_probe_sees_what_is_imported():
    assert {"json", "harness"} <= loaded(["harness.verdict"])
    assert "torch" in loaded(["torch"])
    assert "scenarios._models" in MODULES
    assert {"syncbn_clip", "logsoftmax_drift", "clip_allreduce"} <= set(SCENARIOS)


def test_listing_and_judging_load_nothing_heavy():
    assert loaded([*LIGHT, *(f"scenarios.{name}" for name in SCENARIOS)]) & set(HEAVY) == set()


@pytest.mark.parametrize("module", ["harness", "launch.list", "launch.judge"])
def test_light_commands_load_nothing_heavy(module):
    assert loaded([module]) & set(HEAVY) == set()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_dry_run_loads_nothing_it_does_not_need(name):
    words = [f"scenario={name}", "gpus=2", "dry_run=true"]
    # The interpreter's own trace: the command may end without running what stands after it.
    answer = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "launch", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    lines = [line for line in answer.stderr.splitlines() if line.startswith("import time:")]
    found = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert {"hydra", "launch"} <= found
    assert found & {"torch", "pandas", "pyarrow", "wandb"} == set()


def test_ranks_load_neither_hydra_nor_pandas_nor_wandb():
    found = loaded([*RANKS, *MODULES])
    assert "torch" in found
    assert found & {"hydra", "omegaconf", "pandas", "pyarrow", "wandb"} == set()


def test_list_needs_no_package_at_all():
    """`make list` answers on a fresh clone, before anything is installed."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['list']\n"
        "import runpy; runpy.run_module('launch.list', run_name='__main__', alter_sys=True)"
    )
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    assert [name for name in SCENARIOS if name not in answer.stdout] == []


@pytest.mark.parametrize("module", MODULES)
def test_scenarios_never_import_each_other(module):
    """import-linter has no pattern for this: a case uses what is shared, and its own parts.

    `scenarios._models` and its like are shared; `scenarios._NAME` holds the parts of scenario NAME.
    """
    case = module.split(".")[1].lstrip("_")
    private = {f"scenarios._{name}" for name in SCENARIOS}
    for found in imports(module):
        if not found.startswith("scenarios."):
            continue
        top = ".".join(found.split(".")[:2])
        public = top.removeprefix("scenarios.") in SCENARIOS
        assert not (public and top != f"scenarios.{case}"), f"{module} imports {found}"
        assert top not in private or top == f"scenarios._{case}", f"{module} imports {found}"
