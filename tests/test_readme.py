"""What README.md and CONTRIBUTING.md tell people to type, and where they send them, exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch import readme

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("README.md", "CONTRIBUTING.md", "scenarios/README.md", "scenarios/CLAIMS.md")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchor(title: str) -> str:
    """What a heading is called in an address."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", TEXTS)
def test_every_target_that_is_named_exists(name):
    targets = set(re.findall(r"^([a-z-]+):(?!=)", MAKEFILE, re.MULTILINE))
    typed = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)(?= |`|$)", text(name), re.MULTILINE))
    assert typed - targets == set()


def test_help_names_every_target_that_can_be_typed():
    listed = re.search(r"^TARGETS := ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
    assert listed is not None
    told = "\n".join(re.findall(r"^##.*", MAKEFILE, re.MULTILINE))
    typed = set(re.findall(r"make ([a-z-]+)", told)) | set(re.findall(r"\| ([a-z-]+)", told))
    assert set(listed[1].replace("\\\n", " ").split()) - typed == {"help"}


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name):
    for target in re.findall(r"\]\(([^)]+)\)", text(name)):
        path, _, part = target.partition("#")
        if path.startswith("http"):
            continue
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        if part:
            titles = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert part in map(anchor, titles), target


def test_how_many_scenarios_there_are_is_counted(monkeypatch):
    names = ["bn_momentum", "syncbn_clip", "bn_stats_local"]
    monkeypatch.setattr(readme, "own", lambda: names)
    right = readme.table()
    assert right.startswith("3 scenarios, 2 of them of several ranks:\n")
    assert readme.unlisted(right) == []
    monkeypatch.setattr(readme, "own", lambda: names[:2])
    assert readme.unlisted(right) == ["does not say 2 scenarios, 1 of them of several ranks:"]
