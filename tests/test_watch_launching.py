"""However the ranks are started, and whatever the script is: mp.spawn, modules, restarts."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.watching import ROOT, environment, torchrun

SPAWNING = "tests/watched/spawning.py"


def run(*words, cwd=ROOT, **more):
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=environment() | more, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [("none", 0, "no divergence"), ("bypass", 20, "step 2"), ("raises", 1, "ValueError")],
)
def test_ranks_that_the_script_spawns_are_watched(tmp_path, fault, code, said):
    # Without PYTHONPATH: from a checkout, the new processes have to find the watcher all the same.
    ended = run(
        "-m", "harness.watch", SPAWNING, "--out", tmp_path, "--fault", fault, PYTHONPATH=""
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert "torchrun reports" not in ended.stderr
    assert ended.stdout == ("" if fault == "raises" else "joined\n")
    if fault == "bypass":
        assert "ddp_forward_bypassed at" in ended.stderr
        assert "spawning.py:20" in ended.stderr


def package(folder, body):
    (folder / "project").mkdir()
    (folder / "project" / "__init__.py").write_text("")
    (folder / "project" / "part.py").write_text("HERE = 7\n")
    (folder / "project" / "train.py").write_text(textwrap.dedent(body))
    return folder


def test_a_module_runs_as_with_python_m(tmp_path):
    body = """
        import sys
        from .part import HERE
        assert __spec__.name == "project.train" and __package__ == "project"
        print(__name__, HERE, sys.argv[1:], sys.path[0])
        """
    package(tmp_path, body)
    bare = run("-m", "project.train", "-x", cwd=tmp_path)
    watched = run("-m", "harness.watch", "-m", "project.train", "-x", cwd=tmp_path)
    assert bare.stdout.startswith("__main__ 7 ['-x']")
    assert watched.stdout == bare.stdout
    assert (bare.returncode, watched.returncode) == (0, 22)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-m", "harness.watch", "-m", "no.such.module"), "no.such.module"),
        (("-m", "harness.watch", "-m", "project"), "project"),
        (("-m", "harness.watch", "missing.py"), "missing.py"),
        (("-m", "harness.watch", "--audit", "often", "x.py"), "every=N"),
        (("-m", "harness.watch", "--hang-timeout", "0", "x.py"), "seconds"),
    ],
)
def test_bad_input_is_one_message_and_2(tmp_path, words, said):
    package(tmp_path, "")
    ended = run(*words, cwd=tmp_path)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_parameters_declared_local_are_not_compared():
    ended = torchrun(
        "-m", "harness.watch", "--unequal", "stem.*", "tests/watched/classifier.py",
        "--fault", "bit", ranks=2,
    )  # fmt: skip
    # The bit is flipped in stem.weight: the others follow one update later, through the loss.
    first = next(line for line in ended.stderr.splitlines() if line.startswith("crossrank:"))
    assert "stem" not in first


def test_a_restarted_run_is_watched_anew(tmp_path):
    # Without a process group: after a restart gloo at times calls at the addresses of ranks that
    # are gone, and what is asked here is whether the attempts have a meeting place each.
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import os, torch
            torch.manual_seed(0)
            rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            model = torch.nn.Sequential(torch.nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                model(torch.ones(2, 4)).sum().backward()
                if attempt == 1 and step == 3 and rank == 1:
                    model[0].weight.grad[0, 0] += 1
                optimizer.step()
                optimizer.zero_grad()
                if attempt == 0 and step == 1:
                    raise SystemExit(7)
            """
        )
    )
    ended = torchrun(
        "--max-restarts=1", "-m", "harness.watch", tmp_path / "train.py", ranks=2
    )  # fmt: skip
    said = [line for line in ended.stderr.splitlines() if line.startswith("crossrank:")]
    found = "step 3: ranks 0 and 1 differ in gradient 0.weight, 1 of 2"
    assert any(found in line for line in said), ended.stderr
    assert not any("step 1:" in line for line in said)


def test_a_run_of_one_process_is_answered_whatever_the_one_before_it_left(tmp_path):
    (tmp_path / "raises.py").write_text("import torch\nraise ValueError('kept')\n")
    (tmp_path / "well.py").write_text("import torch\nprint('well')\n")
    # Both have the same parent, which is this process.
    assert run("-m", "harness.watch", tmp_path / "raises.py").returncode == 1
    ended = run("-m", "harness.watch", tmp_path / "well.py")
    assert ended.stdout == "well\n"
    assert "crossrank: one process" in ended.stderr
    assert run("-m", "harness.watch", tmp_path / "raises.py").returncode == 1
