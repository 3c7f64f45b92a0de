"""Predictions are fixed before anything runs: a digest of each stands in its run's directory.

It is made from the answer, a number that nobody knows beforehand, and the plan of the run. Answer
and number are written down when the run is through, and anybody can make the digest again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import PrerequisiteError, RecordError
from harness.plan import Layout, write_text
from launch.predict.answers import Answer
from launch.runs import read_json

NAME = "prediction.json"


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """An answer, and what it takes to show that it was given before the run."""

    answer: Answer
    nonce: str
    digest: str


def digest(plan: Mapping[str, Any], answer: Mapping[str, Any], nonce: str) -> str:
    """Return the SHA-256 of plan, answer and nonce."""
    whole = {"plan": plan, "answer": answer, "nonce": nonce}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def seal(layout: Layout, answer: Answer) -> Sealed:
    """Write the digest of an answer into a run directory that has a plan and nothing else yet.

    Raises:
        PrerequisiteError: if the directory has records or a prediction already.
    """
    path = layout.root / NAME
    records = layout.root / "records"
    there = [str(p.name) for p in (path, records, layout.verdict) if p.exists()]
    if there:
        raise PrerequisiteError(
            f"{layout.root} has {', '.join(there)} already: a prediction comes before the run\n"
            "type make predict for a run of its own"
        )
    nonce = secrets.token_hex(16)
    found = digest(read_json(layout.plan), asdict(answer), nonce)
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_text(path, json.dumps({"sha256": found, "written": written}, indent=2) + "\n")
    return Sealed(answer=answer, nonce=nonce, digest=found)


def check(run: Path, answer: Mapping[str, Any], nonce: str) -> bool:
    """Say whether this is the answer that was sealed in a run directory.

    Raises:
        RecordError: if the directory holds no prediction.
    """
    layout = Layout(run)
    stored = read_json(run / NAME).get("sha256")
    if not stored:
        raise RecordError(f"{run / NAME} holds no digest")
    return bool(stored == digest(read_json(layout.plan), answer, nonce))
