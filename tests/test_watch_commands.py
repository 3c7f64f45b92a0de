"""What is typed to the watcher: mistakes, narrow terminals, readers that go away."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from harness.causes import catalogue
from harness.watch import commands
from harness.watch.starting import options, script
from tests.watching import ROOT, environment

TRAIN = ("train.py",)


def watch(*words, stdout=subprocess.PIPE):
    command = [sys.executable, "-m", "harness.watch", *words]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("words", [("causes",), ("causes", "--json"), ("explain", "hooks_lost")])
def test_a_reader_that_went_away_gets_no_traceback(words):
    read, write = os.pipe()
    os.close(read)
    try:
        ended = watch(*words, stdout=write)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_no_line_of_the_causes_is_wider_than_the_terminal(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert commands.command("causes", []) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert [name for name in catalogue() if name not in out.split()] == []


def test_in_a_narrow_terminal_no_text_is_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    commands.command("causes", [])
    out = " ".join(capsys.readouterr().out.split())
    assert [one.name for one in catalogue().values() if " ".join(one.sees.split()) not in out] == []


@pytest.fixture
def naps(monkeypatch):
    """The seconds that are slept, and none of them."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.mark.parametrize("rank", [None, "0", "3"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "error: the following arguments are required: script\n  options and other commands: "),
        (("--bogus", *TRAIN), "unrecognized arguments: --bogus"),
        (("--hang-timeout", "abc", *TRAIN), "'abc' is no time to wait; type seconds, such as 60"),
        (("--hang-timeout", "0", *TRAIN), "'0' is no time to wait; type seconds, such as 60"),
        (("--hang-timeout", "nan", *TRAIN), "'nan' is no time to wait"),
        (("--record", "/dev/null/here", *TRAIN), "argument --record: cannot make /dev/null/here: "),
        (("--folder", "/dev/null/here", *TRAIN), "argument --folder: cannot make /dev/null/here: "),
        (("--audit", "foo", *TRAIN), "'foo' is not of the form every=N"),
    ],
)
def test_what_will_not_do_is_said_once_on_a_host(monkeypatch, capsys, naps, rank, words, said):
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit) as ended:
        options.parse(words)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Error" not in err
    # The first rank of a host speaks at once, and the launcher then ends the others.
    assert naps == ([options.PATIENCE] if rank == "3" else [])


def test_the_other_ranks_wait_with_a_script_that_is_not_there(monkeypatch, capsys, naps):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as ended:
        script.prepare(options.parse(["nowhere.py"]))
    assert ended.value.code == 2
    assert "cannot read the script 'nowhere.py': No such file" in capsys.readouterr().err
    assert naps == [options.PATIENCE]
