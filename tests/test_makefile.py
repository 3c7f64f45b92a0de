"""Everything typed after `make` reaches Python, checked against the real make."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.make_arguments import arguments, overrides

ROOT = Path(__file__).resolve().parent.parent
ECHO = """
import json, os, sys
print(json.dumps([sys.argv[1:], sorted(os.environ)]))
"""
AWKWARD = [
    "scenario=x",
    "gpus=4",
    "a=two  words ",
    "b=$(unmatched",
    "c=[1,2]",
    'd={x: 1, y: "q"}',
    "e.f=$x",
    "g='a;b#c\\d'",
    "+h=1",
    "newline=a\nb",
    "tab=a\tb\\",
    "both=x\\\ny",
    "empty=",
    "call=choice(1,2);rm -rf",
    "slash=q\\",
    "percent=%x:=y",
    "accent=é",
    "slashes=a\\\\ b",
    "dollars=$$x$(shell touch ran)`touch ran`",
    "scenario@there=1",
    "hydra/launcher=basic",
    "~deleted=v",
    "dashes=-- z",
    "scenaro=typo",
    "PATHS=mine",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone in which `launch` and its commands say what they were called with."""
    folder = tmp_path_factory.mktemp("a clone")
    (folder / "launch").mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "launch" / "make_arguments.py", folder / "launch")
    shutil.copy(ROOT / "launch" / "bootstrap.py", folder / "launch")
    echoing = ("__main__", "judge", "report", "list", "doctor", "show", "new", "claims")
    for name in ("__init__", *echoing):
        (folder / "launch" / f"{name}.py").write_text("" if name == "__init__" else ECHO)
    for package, name in (("corpus", "__main__"), ("corpus", "diff"), ("predict", "__main__")):
        (folder / "launch" / package).mkdir(exist_ok=True)
        (folder / "launch" / package / "__init__.py").touch()
        (folder / "launch" / package / f"{name}.py").write_text(ECHO)
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    for name in ("constraints.txt", "pyproject.toml", ".venv/.crossrank-stamp"):
        (folder / name).touch()
    yield folder
    assert not (folder / "ran").exists(), "a value was run as a command"


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make without what an outer make, or the person, may have set."""
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHON", "VENV")
    environment = {key: value for key, value in os.environ.items() if key not in outer}
    return subprocess.run(
        ["make", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def echoed(folder: Path, *words: str) -> list[str]:
    answer = make(folder, *words)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)[0]


def test_every_awkward_value_arrives_as_typed_and_in_order(folder):
    assert echoed(folder, "repro", *AWKWARD) == AWKWARD


def test_sweep_puts_multirun_first(folder):
    assert echoed(folder, "sweep", "seed=1,2", "gpus=2") == ["-m", "seed=1,2", "gpus=2"]


def test_options_of_make_itself_do_not_arrive(folder):
    assert echoed(folder, "-k", "-s", "-j4", "repro", "seed=1") == ["seed=1"]


def test_without_keys_nothing_arrives(folder):
    assert echoed(folder, "repro") == []
    assert echoed(folder, "-k", "repro") == []


def test_keys_of_the_makefile_stay_with_it(folder):
    python = f"PYTHON={sys.executable}"
    assert echoed(folder, "list", "VENV=./.venv", python) == []
    assert echoed(folder, "repro", "VENV=./.venv", "seed=1") == ["seed=1"]


def test_a_place_that_make_cannot_spell_is_refused(folder):
    answer = make(folder, "repro", f"VENV={folder / '.venv'}")
    assert answer.returncode == 2
    assert "path without spaces" in answer.stderr
    assert answer.stdout == ""


def test_keys_do_not_leak_into_the_environment(folder):
    answer = make(folder, "repro", "seed=1", "RANK=7")
    _, environment = json.loads(answer.stdout)
    assert not {"seed", "RANK", "MAKEFLAGS", "MAKELEVEL"} & set(environment)
    assert "PATH" in environment


value = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30).map(
    # Blanks between the `=` and the value are the only thing make drops.
    lambda text: text.lstrip(" \t\n\r\v\f")
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(value, min_size=1, max_size=8))
def test_any_text_arrives_as_typed(folder, values):
    typed = [f"key{index}={text}" for index, text in enumerate(values)]
    assert echoed(folder, "repro", *typed) == typed


def test_judge_takes_its_run_and_nothing_else(folder):
    assert echoed(folder, "judge", "run=results/a b") == ["results/a b"]
    for words in (["judge"], ["judge", "run="], ["judge", "rum=x", "run=y"]):
        answer = make(folder, *words)
        assert answer.returncode == 2
        assert "run=" in answer.stderr
        assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("target", ["corpus", "corpus-diff", "list", "show", "new", "predict"])
def test_commands_with_keys_of_their_own_get_them_as_typed(folder, target):
    typed = ["gpus=2,4", "a=results/corpus/two words", "family=random numbers", "b=$x"]
    assert echoed(folder, target, *typed) == typed
    assert echoed(folder, target) == []


def test_claims_takes_no_keys(folder):
    assert echoed(folder, "claims") == []
    assert make(folder, "claims", "a=1").returncode == 2


def test_words_without_a_value_are_refused_before_anything_runs(folder):
    answer = make(folder, "repro", "gpus", "4")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "no target named gpus 4" in answer.stderr


def test_help_and_list_need_no_environment(folder, tmp_path):
    absent = f"VENV={tmp_path / 'absent'}"
    python = f"PYTHON={sys.executable}"
    assert "make repro scenario=" in make(folder, "help", absent, python).stdout
    assert echoed(folder, "list", absent, python) == []
    assert not (tmp_path / "absent").exists()


def test_help_names_every_target(folder):
    text = make(folder, "help").stdout
    (line,) = [
        line for line in make(folder, "-pn", "help").stdout.splitlines() if "TARGETS :=" in line
    ]
    targets = set(line.split(":=")[1].split())
    assert len(targets) > 15
    assert sorted(targets - set(text.split())) == ["help"]


def test_arguments_are_shell_words_where_the_target_says_so():
    assert arguments(["only", "args*"], ["args=-k 'a b' -x"]) == ["-k", "a b", "-x"]
    assert arguments(["only", "args*"], []) == []


def test_a_first_definition_is_replaced_by_a_later_one(folder):
    assert echoed(folder, "repro", "seed=1", "gpus=2", "seed=3") == ["seed=3", "gpus=2"]


def test_options_before_the_dashes_are_not_keys():
    assert overrides("s -j3 --jobserver-auth=3,4 -- b=2 a=1") == ["a=1", "b=2"]
    assert overrides("s -j3 --jobserver-auth=3,4") == []
