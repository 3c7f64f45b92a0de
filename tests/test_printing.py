"""Whoever reads the output may go away, and its disk may be full: the verdict and its code stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import GIVE_UP_S, ROOT, environment, layouts, verdict_of


def repro(results: Path, stdout: int) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "launch", "scenario=probe", f"results={results}"],
        cwd=ROOT,
        env=environment(),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=GIVE_UP_S,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_the_output(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, said = repro(tmp_path, full)
    finally:
        os.close(full)
    assert (code, "Traceback" in said) == (0, False), said
    assert "cannot print: No space left on device" in said
    assert verdict_of(layouts(tmp_path)[0])["conclusion"] == "as_expected"


def test_a_reader_that_went_away(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        code, said = repro(tmp_path, write)
    finally:
        os.close(write)
    assert (code, "Traceback" in said) == (0, False), said
    assert verdict_of(layouts(tmp_path)[0])["conclusion"] == "as_expected"


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "--help"],
        ["launch", "scenario=probe", "dry_run=true"],
        ["launch.show", "scenario=probe"],
        ["launch.list"],
        ["launch.claims", "--json"],
        ["launch.claims"],
        ["launch.judge", "--help"],
    ],
)
def test_who_has_seen_enough_gets_no_traceback(words: list[str], tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=environment(),
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=GIVE_UP_S,
        )
    finally:
        os.close(write)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert done.returncode in (0, 12)
