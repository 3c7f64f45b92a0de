"""The warm engine: ranks forked from a server that has imported torch already.

Same entry point, environment variables, error files and exit codes as under torchrun. A 4-rank
batch starts in about 0.1 s instead of several seconds. The server is Python's own `forkserver`:
it has run no thread and no torch code but imports, so forking it is sound; CUDA is untouched in it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from harness.errors import PrerequisiteError
from harness.plan import Layout, Plan
from launch import torchrun

ROOT = Path(__file__).resolve().parent.parent
_TURN = threading.Lock()
"""Threads may run a batch each. Whenever a process is started, multiprocessing looks for others
that have ended, and an exit code can be read once: two that look at the same time lose it."""


def usable() -> bool:
    """Say whether this platform can fork a warm server soundly: Linux only."""
    return sys.platform == "linux"


class WarmRanks:
    """The processes of one batch."""

    def __init__(self, processes: Mapping[int, ForkServerProcess], command: Sequence[str]) -> None:
        """Hold running processes by rank."""
        self.command = command
        self._processes = processes

    def poll(self, seconds: float) -> Mapping[int, int | None]:
        """Wait until a rank ends or the time is over; return rank -> exit code."""
        with _TURN:
            alive = [p.sentinel for p in self._processes.values() if p.exitcode is None]
        if alive:
            wait(alive, timeout=seconds)
        with _TURN:
            return {rank: process.exitcode for rank, process in self._processes.items()}

    def leaving(self) -> bool:
        """Return False: exit codes are known at once."""
        return False

    def signal(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        with _TURN:
            for process in self._processes.values():
                if process.exitcode is None and process.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)

    def stop(self) -> None:
        """Kill what still runs and wait for it."""
        self.signal(signal.SIGKILL)
        with _TURN:
            for process in self._processes.values():
                process.join()


class Warm:
    """Starts ranks from a fork server that lives as long as this engine's process."""

    name = "warm"

    def __init__(self, *, port: int = 0) -> None:
        """Make the engine; `port` 0 = any free one for the ranks' store."""
        self._port = port
        self._context = multiprocessing.get_context("forkserver")

    @staticmethod
    def heat() -> None:
        """Start the server now, so that it imports while the caller does something else."""
        before = os.environ.get("PYTHONPATH")
        paths = [str(ROOT), *(before or "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        try:
            forkserver.set_forkserver_preload(["launch.preload"])
            forkserver.ensure_running()
        finally:
            # The server has it, and its ranks; whatever else this process starts is others'.
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before

    def start(self, plan: Plan, layout: Layout, arms: Sequence[str], batch: int) -> WarmRanks:
        """Fork one process a rank.

        Raises:
            PrerequisiteError: if the chosen port is taken.
        """
        self.heat()
        listener = _listen(self._port)
        argv = torchrun.rank_arguments(layout, arms, batch)
        port = listener.getsockname()[1]
        processes: dict[int, ForkServerProcess] = {}
        try:
            for rank in range(plan.world_size):
                process = self._context.Process(
                    target=_rank,
                    args=(
                        argv,
                        environment(rank, plan.world_size, port, plan.run_id)
                        | {"TORCHELASTIC_ERROR_FILE": str(layout.error(batch, rank))},
                        str(layout.log(batch, rank)),
                        listener if rank == 0 else None,
                    ),
                    name=f"rank{rank}",
                )
                with _TURN:
                    process.start()
                processes[rank] = process
        except BaseException:
            WarmRanks(processes, ()).stop()
            raise
        finally:
            listener.close()
        command = torchrun.command(plan, layout, arms, batch, port=self._port)
        return WarmRanks(processes, command)

    def close(self) -> None:
        """Stop the server; a later batch starts a new one."""
        server = forkserver._forkserver
        with contextlib.suppress(AttributeError, OSError):
            server._stop()  # type: ignore[attr-defined]


def _rank(
    argv: Sequence[str], env: Mapping[str, str], log: str, listener: socket.socket | None
) -> None:
    from launch.rank import child

    # A rank gets a copy of the pipe by whose closing the server learns that the launcher is gone:
    # while a rank that hangs holds it, a killed launcher would leave server and ranks behind.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    child(argv, env, log, listener)


def environment(rank: int, world_size: int, port: int, run_id: str) -> dict[str, str]:
    """Return the variables torchrun sets for one rank of a job on one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # One machine: without this gloo resolves the host's name, which fails on many laptops.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def _listen(port: int) -> socket.socket:
    """Return a listening socket for rank 0's store: held from here on, so nobody can take it."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # The connections of the batch before linger on a chosen port for a minute; a port that somebody
    # listens on is refused all the same.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise PrerequisiteError(
            f"port {port} is taken on this machine ({error.strerror})\n"
            "type launch.port=0 for any free port, or name another one"
        ) from error
    return listener
