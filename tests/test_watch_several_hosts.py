"""Real ranks of several hosts: each has a temp directory of its own, and nothing else is shared."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys

import pytest

from tests.watching import ROOT, environment

CLASSIFIER = "tests/watched/classifier.py"
FORWARD = "        forward(torch.randn(4, 6, generator=generator)).square().mean().backward()"
BY_SLURM = ROOT / "tests/watched/by_slurm.py"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def together(commands):
    """Run a command for each host at once; return exit code and stderr of each."""
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *map(str, words)],
            cwd=more.pop("cwd", ROOT),
            env=environment() | more,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words, more in commands
    ]
    try:
        said = [one.communicate(timeout=100)[1] for one in running]
    finally:
        for one in running:
            one.kill()
    return [(one.returncode, text) for one, text in zip(running, said, strict=True)]


def temporary(tmp_path, host):
    folder = tmp_path / f"tmp{host}"
    folder.mkdir()
    return {"TMPDIR": str(folder)}


def torchrun(tmp_path, *words, ranks=1, watch=(), script=CLASSIFIER):
    port = free_port()
    return together(
        (
            [
                *("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}"),
                *(f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"),
                *(f"--master-port={port}", "-m", "harness.watch", *watch, script, *words),
            ],
            temporary(tmp_path, host),
        )
        for host in range(2)
    )


def srun(tmp_path, *words, watch=()):
    """Two tasks as srun starts them: dealt out in turn, so that counts do not tell who is where."""
    port = free_port()
    return together(
        (
            ["-m", "harness.watch", *watch, BY_SLURM, "--port", port, *words],
            {
                **(here := temporary(tmp_path, host)),
                "cwd": here["TMPDIR"],
                "SLURM_PROCID": str(host),
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": "0",
            },
        )
        for host in range(2)
    )


def answers(ended):
    return [
        line for _, said in ended for line in said.splitlines() if line.startswith("crossrank:")
    ]


def ranks_in_table(ended):
    """The ranks of which the table of calls has the one without a partner."""
    return set(re.findall(r"^ +-> +(\d) ", "".join(said for _, said in ended), re.MULTILINE))


def test_a_bit_that_flips_on_another_host_is_traced_to_its_rank(tmp_path):
    ended = torchrun(
        tmp_path, "--fault", "bit", "--bad-rank", "3",
        ranks=2, watch=["--json", tmp_path / "watch.json"],
    )  # fmt: skip
    answer = json.loads((tmp_path / "watch.json").read_text())
    found = answer["divergence"]
    assert (found["step"], found["ranks"]) == (3, [0, 1, 2, 3]), ended
    assert found["differences"][0]["groups"] == [[0, 1, 2], [3]]
    # The rule reads the journals of all ranks, of whatever host.
    assert answer["diagnoses"][0]["cause"] == "out_of_band_write"
    assert [code for code, _ in ended] == [1, 1], "torchrun makes 1 of every other code"
    assert sum(said.count("exitcode  : 20") for _, said in ended) == 2
    assert not any("were compared, those of this host" in said for _, said in ended)


def test_hosts_that_agree_are_said_to_be_equal_once(tmp_path):
    ended = torchrun(tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    assert answers(ended) == [
        "crossrank: no divergence: 6 replicated parameters, 5 updates, 2 ranks"
    ]
    assert not list(tmp_path.glob("tmp*/crossrank-*/watch-*")), "temporary files were left behind"


def test_hosts_that_share_a_folder_need_no_store(tmp_path):
    ended = torchrun(tmp_path, watch=["--folder", tmp_path / "shared"])
    assert [code for code, _ in ended] == [0, 0], ended
    # The witness of each host has nothing to add to a run that has ended well.
    assert answers(ended) == [
        "crossrank: no divergence: 6 replicated parameters, 5 updates, 2 ranks"
    ]


PARTED = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank, odd = dist.get_rank(), int(sys.argv[2])
for step in range(6):
    if rank == odd and step == 3 and sys.argv[1] == "raises":
        raise ValueError("a bad row")
    if rank == odd and step == 3 and sys.argv[1] == "skips":
        continue
    optimizer.zero_grad()
    model(torch.ones(3, 4)).mean().backward()
    optimizer.step()
if rank == odd:
    dist.barrier()  # for one rank
dist.destroy_process_group()
"""


@pytest.mark.parametrize("odd", [0, 3])
def test_a_hang_of_ranks_on_several_hosts_is_answered_once_and_ended_everywhere(tmp_path, odd):
    (tmp_path / "train.py").write_text(PARTED)
    out = tmp_path / "watch.json"
    ended = torchrun(
        tmp_path, "skips", odd,
        ranks=2, watch=["--hang-timeout", 3, "--json", out], script=tmp_path / "train.py",
    )  # fmt: skip
    (answer,) = answers(ended)
    others = {0: "1, 2 and 3", 3: "0, 1 and 2"}[odd]
    assert f"rank {odd}: called barrier" in answer
    assert f"which ranks {others} never did" in answer
    given = json.loads(out.read_text())
    assert given["exit_code"] == 21
    assert given["diagnoses"][0]["cause"] == "rank0_only_collective"
    assert ranks_in_table(ended) == {"0", "1", "2", "3"}
    assert all("exitcode  : 21" in said for _, said in ended), ended


def test_a_rank_that_raises_is_answered_with_what_the_ranks_of_all_hosts_were_doing(tmp_path):
    (tmp_path / "train.py").write_text(PARTED)
    ended = torchrun(tmp_path, "raises", 0, ranks=2, script=tmp_path / "train.py")
    (answer,) = answers(ended)
    assert "rank 0: raised ValueError: a bad row; cause: rank_raised" in answer
    assert ranks_in_table(ended) == {"0", "1", "2", "3"}


def test_tasks_of_srun_find_each_other_without_torchrun(tmp_path):
    ended = srun(tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    assert answers(ended) == [
        "crossrank: no divergence: 4 replicated parameters, 5 updates, 2 ranks"
    ]


def test_a_folder_that_hosts_do_not_share_is_said_to_be_none_and_a_fault_is_found(tmp_path):
    # The same word on both hosts, and another folder on each.
    ended = srun(tmp_path, "--bypass-from", "2", watch=["--folder", "watched"])
    # Both hosts end with it: a launcher waits long for a host that ends otherwise.
    assert [code for code, _ in ended] == [20, 20], ended
    last = answers(ended)[-1]
    assert "step 2: ranks 0 and 1 differ in gradient" in last
    forward = BY_SLURM.read_text().splitlines().index(FORWARD) + 1
    assert f"cause: ddp_forward_bypassed at {BY_SLURM}:{forward}" in last
    assert "--folder watched is not one folder for all ranks" in "".join(said for _, said in ended)
