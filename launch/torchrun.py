"""The torchrun engine: the command a person would type, built by a pure function, and watched."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import PrerequisiteError
from harness.plan import Layout, Plan
from launch.lifeline import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
STOP_S = 15.0
"""How long torchrun's agent gets to stop its workers before it is killed."""
SUMMARY = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*exitcode\s*:\s*(-?\d+)")


def rank_arguments(layout: Layout, arms: Sequence[str], batch: int) -> list[str]:
    """Return what every rank's entry point gets."""
    return [str(layout.plan), "--arms", ",".join(arms), "--batch", str(batch)]


def command(
    plan: Plan,
    layout: Layout,
    arms: Sequence[str],
    batch: int,
    *,
    port: int = 0,
    python: str = "python",
) -> list[str]:
    """Return the torchrun command of one batch as a list of arguments; starts nothing.

    `port` 0 lets torchrun pick one (`--standalone`).
    """
    place = ["--master-addr=127.0.0.1", f"--master-port={port}"] if port else ["--standalone"]
    return [
        python,
        "-m",
        "torch.distributed.run",
        *place,
        "--nnodes=1",
        f"--nproc-per-node={plan.world_size}",
        "-m",
        "launch.rank",
        *rank_arguments(layout, arms, batch),
    ]


class TorchrunRanks:
    """torchrun's agent and, under it, the ranks of one batch."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        command: Sequence[str],
        plan: Plan,
        layout: Layout,
        arms: Sequence[str],
        batch: int,
    ) -> None:
        """Hold a running agent."""
        self.command = command
        self._process = process
        self._plan = plan
        self._layout = layout
        self._arms = arms
        self._batch = batch
        self._seen = 0
        """Most children the agent was polled with: all of them, who need a while to begin."""

    def poll(self, seconds: float) -> Mapping[int, int | None]:
        """Wait until the agent ends or the time is over; return rank -> exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)
        code = self._process.returncode
        self._seen = max(self._seen, len(_children(self._process.pid)))
        everyone = range(self._plan.world_size)
        if code is None or code == 0:
            return dict.fromkeys(everyone, code)
        self._gather()
        found = self._summary()
        if not found:
            return dict.fromkeys(everyone, code)
        # Ranks the agent stopped because another one failed are not failures of their own.
        return {rank: found.get(rank) if rank in found else 0 for rank in everyone}

    def leaving(self) -> bool:
        """Say whether a rank is gone; its agent tells the exit code when it ends itself."""
        return len(_children(self._process.pid)) < self._seen

    def signal(self, number: int) -> None:
        """Send a signal to every rank that still runs: the agent's children.

        Where the kernel does not list them nothing is sent: a process id from a record may
        belong to a stranger by now.
        """
        if self._process.poll() is not None:
            return
        for pid in _children(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """End the agent, which ends its workers; each worker dies with it in any case."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._gather()

    def _agent_log(self) -> str:
        with contextlib.suppress(OSError):
            return agent_log(self._layout, self._batch).read_text("utf-8", "replace")
        return ""

    def _summary(self) -> dict[int, int]:
        return {int(rank): int(code) for rank, code in SUMMARY.findall(self._agent_log())}

    def _gather(self) -> None:
        """Put torchrun's error files and logs where every engine keeps them."""
        for folder in agent_files(self._layout, self._batch).glob("*/attempt_*/*"):
            rank = int(folder.name)
            with contextlib.suppress(OSError):
                found = folder / "error.json"
                if found.exists():
                    # Copied with its time of writing, which tells who failed first.
                    shutil.copy2(found, self._layout.error(self._batch, rank))
                parts = [folder / "stdout.log", folder / "stderr.log"]
                text = b"".join(part.read_bytes() for part in parts if part.exists())
                self._layout.log(self._batch, rank).write_bytes(text)


def _children(parent: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listing.read_text().split())
    return found


def agent_log(layout: Layout, batch: int) -> Path:
    """Return where the agent's own output goes."""
    return layout.root / "logs" / f"batch{batch}.torchrun.log"


def agent_files(layout: Layout, batch: int) -> Path:
    """Return where the agent keeps the output and error files of its workers."""
    return layout.root / "logs" / f"batch{batch}.torchrun"


class Torchrun:
    """Starts ranks through the real torchrun."""

    name = "torchrun"

    def __init__(self, *, port: int = 0) -> None:
        """Make the engine; `port` 0 = torchrun picks one."""
        self._port = port

    def start(self, plan: Plan, layout: Layout, arms: Sequence[str], batch: int) -> TorchrunRanks:
        """Start one agent with all ranks of the batch.

        Raises:
            PrerequisiteError: if the chosen port is taken.
        """
        if self._port:
            _check_free(self._port)
        argv = command(plan, layout, arms, batch, port=self._port, python=sys.executable)
        logs = agent_files(layout, batch)
        logs.mkdir(parents=True, exist_ok=True)
        run = argv.index("torch.distributed.run") + 1
        argv[run:run] = [f"--log-dir={logs}", "--redirects=3"]
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        env.setdefault("OMP_NUM_THREADS", "1")
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with agent_log(layout, batch).open("ab") as log:
            process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return TorchrunRanks(process, argv, plan, layout, arms, batch)

    def close(self) -> None:
        """Nothing is kept between batches."""


def shown(argv: Sequence[str]) -> str:
    """Return a command as one line to copy into a shell."""
    return shlex.join(argv)


def _check_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PrerequisiteError(
                f"port {port} is taken on this machine ({error.strerror})\n"
                "type launch.port=0 for any free port, or name another one"
            ) from error
