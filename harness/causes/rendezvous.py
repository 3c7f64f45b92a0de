"""Process groups that do not come about: nothing in the environment, nobody there, port taken."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence

FAMILY = "rendezvous"
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_TAKEN = ("eaddrinuse", "address already in use")
_NOBODY = (
    "waiting for clients",
    "failed to connect",
    "timed out after",
    "connection refused",
    "no route to host",
    "getaddrinfo",
    "name or service not known",
    "hostname of the client socket cannot be retrieved",
)
_NETWORK = ("DistStoreError", "DistNetworkError", "TimeoutError", "ConnectionError")


def _kind(error: Mapping[str, Any]) -> str | None:
    said = str(error["message"]).lower()
    missing = re.search(r"environment variable (\w+) expected", str(error["message"]))
    if missing or (error["type"] == "KeyError" and _variable(error) is not None):
        return "missing"
    if any(sign in said for sign in _TAKEN):
        return "taken"
    if error["type"] in _NETWORK and any(sign in said for sign in _NOBODY):
        return "nobody"
    return None


def _variable(error: Mapping[str, Any]) -> str | None:
    said = str(error["message"])
    found = re.search(r"environment variable (\w+) expected", said)
    name = found.group(1) if found else said.strip("'\"")
    return name if name in _VARIABLES else None


def is_rendezvous(error: Mapping[str, Any]) -> bool:
    """Say whether an error is about the process group not coming about."""
    return _kind(error) is not None


def _errors(evidence: Evidence, kind: str) -> dict[int, Mapping[str, Any]]:
    errors = {rank: end["error"] for rank, end in evidence.ends.items() if end.get("error")}
    return {rank: error for rank, error in errors.items() if _kind(error) == kind}


def _diagnosis(errors: Mapping[int, Mapping[str, Any]], because: str) -> Diagnosis:
    first = next(iter(errors.values()))
    stack = first.get("stack", ())
    said = str(first["message"]).partition("\n")[0][:160]
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(because, f"{first['type']}: {said}"),
        where=f"{stack[0][0]}:{stack[0][1]}" if stack else None,
        explains=False,
    )


@cause(
    family=FAMILY,
    sees="`environment variable RANK expected, but not set`, or a KeyError, at once.",
    why="A process learns from its environment which rank it is; torchrun and its like set it. "
    "Started with plain `python` there is nothing to read.",
    confirm="Print os.environ.get('RANK').",
    change="start the script with torchrun",
    fix="""
torchrun --nproc-per-node=4 train.py         # not: python train.py
# under SLURM: export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
""",
    reported=("pytorch/pytorch#49846", "pytorch/pytorch#63874"),
)
def rank_not_in_environment(evidence: Evidence) -> Diagnosis | None:
    """Recognise the error of a process that was started by nobody who sets it."""
    errors = _errors(evidence, "missing")
    if not errors:
        return None
    name = _variable(next(iter(errors.values()))) or "RANK"
    return _diagnosis(errors, f"the environment has no {name}")


@cause(
    family=FAMILY,
    sees="init_process_group returns nothing for minutes, then `1/2 clients joined`, or a "
    "connection that is refused.",
    why="The ranks meet at MASTER_ADDR:MASTER_PORT. Either not all of them were started, or they "
    "cannot reach that address: another network interface, a firewall, a typing error.",
    confirm="From the other host: `nc -vz $MASTER_ADDR $MASTER_PORT`; count the processes.",
    change="start as many processes as WORLD_SIZE says, and check MASTER_ADDR from every host",
    fix="""
dist.init_process_group("nccl", timeout=timedelta(minutes=2))   # to be told sooner
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0        # the interface that is shared
""",
    reported=("pytorch/pytorch#52848", "pytorch/pytorch#15638"),
)
def peer_unreachable(evidence: Evidence) -> Diagnosis | None:
    """Recognise a store at which not all ranks have come in time."""
    errors = _errors(evidence, "nobody")
    if not errors:
        return None
    joined = re.search(r"(\d+)/(\d+) clients joined", str(next(iter(errors.values()))["message"]))
    if joined:
        return _diagnosis(errors, f"only {joined[1]} of {joined[2]} ranks came to the rendezvous")
    return _diagnosis(errors, "the address of the rendezvous cannot be reached")


@cause(
    family=FAMILY,
    sees="`EADDRINUSE`, `address already in use`, at once.",
    why="Rank 0 opens MASTER_PORT for the others, and another process has it: a second job on the "
    "host, or the last run, whose processes are still there.",
    confirm="`ss -ltnp | grep :$MASTER_PORT` names the process that has it.",
    change="use a free port, or torchrun --standalone, which finds one",
    fix="""
torchrun --standalone --nproc-per-node=4 train.py
# or: MASTER_PORT=$((20000 + RANDOM % 20000))
""",
    reported=("pytorch/pytorch#81704",),
)
def port_taken(evidence: Evidence) -> Diagnosis | None:
    """Recognise a port that somebody else has opened."""
    errors = _errors(evidence, "taken")
    return _diagnosis(errors, "the port of the rendezvous is taken") if errors else None
