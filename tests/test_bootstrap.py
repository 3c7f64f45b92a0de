"""How the environment is made, with small stand-ins for torch and the other packages.

Everything is real but the packages: venv, pip, locks, signals. No network is used.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "launch" / "bootstrap.py"
BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "crossrank-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        info = "crossrank-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: crossrank\\nVersion: 1.0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""  # noqa: E501 the lines of two small files


def torch_files(version: str) -> dict[str, str]:
    return {
        "torch/__init__.py": f"from torch import version\n__version__ = {version!r}\n",
        "torch/version.py": "cuda = '12.8'\nhip = None\n",
    }


@dataclass
class Clone:
    """A clone with pins of its own, and a folder of wheels in the place of an index."""

    root: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def stamp(self) -> Path:
        return self.venv / ".crossrank-stamp"

    def wheel(self, name: str, version: str, files: dict[str, str]) -> None:
        info = f"{name}-{version}.dist-info"
        path = self.root / "wheels" / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file, text in files.items():
                archive.writestr(file, text)
            archive.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")

    def pin(self, *lines: str) -> None:
        (self.root / "constraints.txt").write_text("\n".join(["# comment", *lines]) + "\n")

    def start(self, *options: str, python: str | Path = sys.executable) -> subprocess.Popen[str]:
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PIP_", "PYTHON", "UV_"))
        }
        environment |= {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": (self.root / "wheels").as_uri(),
            "PIP_CONFIG_FILE": os.devnull,
        }
        return subprocess.Popen(
            [str(python), str(self.root / "launch" / "bootstrap.py"), *options, str(self.venv)],
            env=environment | self.extra,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *options: str, python: str | Path = sys.executable) -> tuple[int, str]:
        """Return the exit code and what was said; standard output must stay empty."""
        process = self.start(*options, python=python)
        out, err = process.communicate(timeout=300)
        assert out == ""
        return process.returncode, err

    def see(self, program: str) -> str:
        python = self.venv / "bin" / "python"
        return subprocess.check_output([python, "-c", program], text=True, cwd="/").strip()

    def uv(self, script: str) -> None:
        path = self.root / "bin" / "uv"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    made = Clone(tmp_path / "a clone")
    for name in ("launch", "wheels", "bin"):
        (made.root / name).mkdir(parents=True)
    shutil.copy(SCRIPT, made.root / "launch")
    (made.root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["launch"]\n'
    )
    (made.root / "launch" / "backend.py").write_text(BACKEND)
    made.wheel("torch", "2.13.0", torch_files("2.13.0"))
    made.wheel("numpy", "1.0", {"numpy.py": ""})
    made.wheel("numpy", "2.0", {"numpy.py": ""})
    made.pin("torch==2.13.0", "numpy==1.0")
    made.uv("exit 1")
    return made


def outer_python(clone: Clone, version: str) -> Path:
    """A Python that has torch: an environment of its own, as a cluster's module would give."""
    outer = clone.root / "outer"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", outer], check=True)
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python = outer / "bin" / "python"
    site = Path(subprocess.check_output([python, "-c", program], text=True).strip())
    for name, text in torch_files(version).items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    return python


@pytest.mark.slow
def test_a_fresh_clone_then_nothing_to_do_then_other_pins(clone):
    # The Python the tests run in has torch: this one stands for a Python that has none.
    python = Path(sys.executable).resolve()
    code, said = clone.run("--default", python=python)
    assert code == 0, said
    assert "torch 2.13.0 (CUDA 12.8 build), installed by pip" in said
    assert clone.see("import importlib.metadata as m; print(m.version('numpy'))") == "1.0"
    assert clone.see("import importlib.metadata as m; print(m.version('crossrank'))") == "1.0"

    # Nothing is asked of pip the second time: it has no wheels to offer and is not missed.
    (clone.root / "wheels").rename(clone.root / "away")
    os.utime(clone.root / "constraints.txt")
    assert clone.run("--default", python=python) == (0, "")
    assert clone.stamp.stat().st_mtime >= (clone.root / "constraints.txt").stat().st_mtime

    # A stamp that is no JSON, as after a full disk, is none; neither is one left by a failure:
    # a pin that cannot be had. The next run then starts over.
    clone.stamp.write_text("{half")
    clone.pin("torch==2.13.0", "numpy==2.0")
    code, said = clone.run("--default", python=python)
    assert code == 1
    assert "this command failed" in said
    assert "Traceback" not in said
    assert not clone.stamp.exists()
    (clone.root / "away").rename(clone.root / "wheels")
    (clone.venv / "left-behind").touch()
    assert clone.run("--default", python=python)[0] == 0
    assert clone.see("import importlib.metadata as m; print(m.version('numpy'))") == "2.0"
    assert not (clone.venv / "left-behind").exists()


@pytest.mark.slow
def test_a_torch_that_is_there_is_used_and_never_replaced(clone):
    python = outer_python(clone, "2.9.1+cu128")
    constraint = clone.root / "container.txt"
    constraint.write_text("numpy==2.0\n")
    clone.extra["PIP_CONSTRAINT"] = str(constraint)
    code, said = clone.run(python=python)
    assert code == 0, said
    assert f"torch 2.9.1+cu128 (CUDA 12.8 build), of {python}, used as it is" in said
    where, version = clone.see("import torch; print(torch.__file__, torch.__version__)").rsplit(
        " ", 1
    )
    assert Path(where).is_relative_to(clone.root / "outer")
    assert version == "2.9.1+cu128"
    assert clone.see("import importlib.metadata as m; print(m.version('numpy'))") == "1.0"

    # Without a chosen Python, new pins go into the environment made from the one chosen before.
    clone.pin("torch==2.13.0", "numpy==2.0")
    assert clone.run("--default", python=Path(sys.executable).resolve())[0] == 0
    assert clone.see("import torch; print(torch.__version__)") == "2.9.1+cu128"
    assert clone.see("import importlib.metadata as m; print(m.version('numpy'))") == "2.0"


def test_a_torch_that_is_too_old_is_named_and_left_alone(clone):
    python = outer_python(clone, "2.8.0")
    code, said = clone.run(python=python)
    assert code == 1
    assert "torch 2.8.0" in said
    assert "2.9 or newer" in said
    assert "Traceback" not in said
    assert not clone.stamp.exists()


@pytest.mark.slow
def test_what_another_make_has_only_begun_to_write_is_no_foreign_environment(clone):
    clone.venv.mkdir()
    (clone.venv / ".crossrank-lock").write_text("")
    (clone.venv / ".crossrank-origin.new").write_text("half a pa")
    code, said = clone.run("--default", python=Path(sys.executable).resolve())
    assert code == 0, said
    assert clone.see("import torch; print(torch.__version__)") == "2.13.0"


@pytest.mark.slow
def test_two_at_once_install_once(clone):
    python = Path(sys.executable).resolve()
    both = [clone.start("--default", python=python) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("installed by pip" in text for text in said) == 1
    assert clone.see("import torch, numpy; print(torch.__version__)") == "2.13.0"


@pytest.mark.slow
def test_uv_brings_torch_where_its_index_answers_and_a_stop_leaves_no_stamp(clone):
    python = Path(sys.executable).resolve()
    started, hold = clone.root / "started", clone.root / "hold"
    os.mkfifo(started)
    os.mkfifo(hold)
    clone.uv(f"""
case "$*" in *--dry-run*) exit 0;; esac
echo $$ > "{started}"
read line < "{hold}"
""")
    process = clone.start("--default", python=python)
    installer = int(started.read_text())
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in said
    assert not clone.stamp.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(installer, 0)

    clone.uv(f"""
echo "$@" >> "{clone.root / "asked"}"
case "$*" in *--dry-run*) exit 0;; esac
exec "$4" -m pip install --quiet torch==2.13.0
""")
    code, said = clone.run("--default", python=python)
    assert code == 0, said
    assert "installed by uv" in said
    asked = (clone.root / "asked").read_text()
    assert "--torch-backend=auto" in asked
    assert "index" not in asked


def test_a_stop_while_an_installer_is_being_started_leaves_none_behind():
    program = """
import os, signal, subprocess, sys
from launch import bootstrap

signal.signal(signal.SIGTERM, bootstrap._end)
begun = []

class Interrupted(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        begun.append(self.pid)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Interrupted
try:
    bootstrap._run([sys.executable, "-c", "import time; time.sleep(600)"])
except SystemExit as end:
    print(end.code, *begun)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    code, installer = map(int, ended.stdout.split())
    assert code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(installer, 0)


def test_a_folder_of_somebody_else_is_left_alone(clone):
    clone.venv.mkdir()
    (clone.venv / "thesis.tex").touch()
    code, said = clone.run()
    assert code == 1
    assert "was not made by this Makefile" in said
    assert "VENV=" in said
    assert [path.name for path in clone.venv.iterdir()] == ["thesis.tex"]


def test_a_python_that_is_too_old_is_told_so():
    program = (
        "import runpy, sys; sys.version_info = (3, 8, 18, 'final', 0)\n"
        f"sys.argv = ['bootstrap', '--check']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.returncode == 1
    assert "Python 3.8.18; crossrank needs 3.10 or newer" in answer.stderr
    assert "make PYTHON=" in answer.stderr


def test_an_old_python_can_read_it():
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
    assert "from __future__ import annotations" not in SCRIPT.read_text()


def test_the_pins_name_torch_apart_and_no_registry():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins[0].startswith("torch==")
    assert all("==" in pin for pin in pins)
    for name in ("constraints.txt", "pyproject.toml", "Makefile", "launch/bootstrap.py", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "://" not in text, name
        assert "--index-url" not in text, name


def test_no_pinned_package_asks_for_torch():
    """Otherwise installing the rest could replace a torch that was there."""
    from importlib.metadata import PackageNotFoundError, requires

    pins = (ROOT / "constraints.txt").read_text().splitlines()
    names = [
        pin.split("==")[0] for pin in pins if "==" in pin and not pin.startswith(("#", "torch="))
    ]
    asking, found = [], 0
    for name in dict.fromkeys(names):
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue
        found += 1
        asking += [name for need in needs if need.split()[0] == "torch" and "extra" not in need]
    assert found > 20
    assert asking == []
