"""Which ranks run on this host, as the launcher tells it. Pure, no torch, and nobody is asked.

Some launchers number the ranks host by host, others deal them out in turn, so a count alone tells
nothing: a launcher is believed only where what it says fits together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
"""Rank, world size and ranks of a host: of Open MPI, of MPICH and Intel MPI, of MVAPICH."""


def ranks_here(
    environment: Mapping[str, str], rank: int, world_size: int
) -> tuple[int, ...] | None:
    """Return the ranks of this host, this one among them; None if no launcher tells.

    Args:
        environment: the variables of this process.
        rank: its rank in the process group, which need not be the one that the launcher gave.
        world_size: the number of ranks of the process group.
    """
    if world_size == 1:
        return (0,)
    for told in (_torchrun, _slurm, _mpi):
        found = told(environment, rank, world_size)
        if found is not None and rank in found and found[-1] < world_size:
            return found
    return None


def _torchrun(environment: Mapping[str, str], rank: int, world_size: int) -> tuple[int, ...] | None:
    if _number(environment, "RANK") != rank or _number(environment, "WORLD_SIZE") != world_size:
        return None
    here, local = _number(environment, "LOCAL_WORLD_SIZE"), _number(environment, "LOCAL_RANK")
    if here is None or local is None or not local < here:
        return None
    return tuple(range(rank - local, rank - local + here))


def _slurm(environment: Mapping[str, str], rank: int, world_size: int) -> tuple[int, ...] | None:
    size = _number(environment, "SLURM_STEP_NUM_TASKS")
    if size is None:
        size = _number(environment, "SLURM_NTASKS")
    if _number(environment, "SLURM_PROCID") != rank or size != world_size:
        return None
    listed = environment.get("SLURM_GTIDS", "")
    if re.fullmatch(r"\d+(,\d+)*", listed):
        return tuple(sorted(map(int, listed.split(","))))
    counts = tasks_per_node(
        environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    )
    node, local = _number(environment, "SLURM_NODEID"), _number(environment, "SLURM_LOCALID")
    if node is None or local is None or not node < len(counts) or sum(counts) != world_size:
        return None
    first = sum(counts[:node])
    # Dealt out in turn, ranks are at other places than those that the counts lead to.
    if rank - local != first:
        return None
    return tuple(range(first, first + counts[node]))


def _mpi(environment: Mapping[str, str], rank: int, world_size: int) -> tuple[int, ...] | None:
    for of_rank, of_world, of_host in _MPI:
        if _number(environment, of_rank) == rank and _number(environment, of_world) == world_size:
            # It says how many ranks the host has, and not which; with all of them it is the same.
            return tuple(range(world_size)) if _number(environment, of_host) == world_size else None
    return None


def tasks_per_node(text: str) -> list[int]:
    """Read what SLURM writes for 2, 2 and 1 tasks: `2(x2),1`; an empty list if it is not that."""
    counts: list[int] = []
    for part in text.split(","):
        read = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if read is None:
            return []
        counts += [int(read[1])] * int(read[2] or 1)
    return counts


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None
