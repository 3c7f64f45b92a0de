"""Numbers that ranks give to names, each by itself."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, cause
from harness.watch.evidence import Evidence


@cause(
    family="data",
    sees="Replicas are equal and the loss stays high; embeddings of labels learn nothing.",
    why="Labels are numbered in the order of a set, or by hash(). Python salts the hash of strings "
    "anew in every process, so that class 3 is another label on each rank.",
    confirm="Print the first entries of the vocabulary on every rank.",
    change="number sorted labels, or read the numbers from one file",
    fix="""
index = {label: i for i, label in enumerate(sorted(set(labels)))}   # not enumerate(set(labels))
""",
    reported=("sktime/pytorch-forecasting#2293",),
)
def ids_differ(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: which label a number stands for is known to the script alone."""
    return None
