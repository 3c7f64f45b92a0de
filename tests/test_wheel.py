"""The wheel holds `harness` alone, and works where nothing of this repository is."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import harness

ROOT = Path(__file__).resolve().parent.parent


def call(*command: str | Path, cwd: Path) -> str:
    answer = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; `make test` has it")
    folder = tmp_path_factory.mktemp("dist")
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    call(sys.executable, "-m", *build, "--wheel-dir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def stranger(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but an environment that has the wheel and no other package."""
    folder = tmp_path_factory.mktemp("stranger")
    call(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    install = ["-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    call(sys.executable, *install, wheel, cwd=folder)
    return folder


def test_it_holds_harness_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"harness"}
    assert "harness/py.typed" in names
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "harness").rglob("*.py")}
    assert sources <= set(names)


def test_data_files_of_the_report_travel_along(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    data = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "harness").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert data <= names


def test_it_requires_torch_only(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_string(archive.read(name).decode())
    requires = metadata.get_all("Requires-Dist") or []
    assert [line for line in requires if "extra ==" not in line] == ["torch>=2.9"]
    assert {"repro", "dev"} <= set(metadata.get_all("Provides-Extra") or [])
    assert (metadata["Name"], metadata["Version"]) == ("crossrank", harness.__version__)


def test_a_stranger_can_import_it_without_any_other_package(stranger):
    program = "import harness, sys; print(harness.__file__); print('torch' in sys.modules)"
    file, torch = call(stranger / "env/bin/python", "-c", program, cwd=stranger).split()
    assert Path(file).is_relative_to(stranger / "env")
    assert torch == "False"


@pytest.mark.parametrize("name", ["launch", "scenarios", "conf", "tests"])
def test_names_that_other_people_use_stay_free(stranger, name):
    program = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    assert call(stranger / "env/bin/python", "-c", program, cwd=stranger).strip() == "None"


def test_type_checkers_see_its_types_from_another_project(stranger):
    pytest.importorskip("mypy", reason="mypy checks the types; `make test` has it")
    (stranger / "use.py").write_text(
        "from harness.record import Header\n"
        "reveal_type(Header(run='', scenario='', arm='', rank=0, world_size=1).rank)\n"
        "Header(run=1, scenario='', arm='', rank=0, world_size=1)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", "env/bin/python", "use.py"],
        cwd=stranger,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 'Revealed type is "int"' in answer.stdout.replace("builtins.", ""), answer.stdout
    assert 'incompatible type "int"; expected "str"' in answer.stdout
    assert answer.returncode == 1
