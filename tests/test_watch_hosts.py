"""Which ranks share a host, as each launcher tells it, and which share a folder. No processes."""

from __future__ import annotations

import shutil

import pytest

from harness.watch.meeting.folder import Folder
from harness.watch.meeting.hosts import ranks_here, tasks_per_node
from harness.watch.meeting.places import line_of, read_places, word_of

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize(
    ("environment", "rank", "world_size", "expected"),
    [
        pytest.param(TORCHRUN, 5, 8, (4, 5, 6, 7), id="torchrun"),
        pytest.param(TORCHRUN, 5, 16, None, id="a group of another size than the launcher's"),
        pytest.param(TORCHRUN, 2, 8, None, id="a rank that the script has given itself"),
        pytest.param(TORCHRUN | {"LOCAL_RANK": "7"}, 5, 8, None, id="a count that cannot be"),
        pytest.param(SRUN, 3, 5, (2, 3), id="srun, node by node"),
        pytest.param(SRUN | {"SLURM_GTIDS": "1,3"}, 3, 5, (1, 3), id="srun, dealt out, listed"),
        pytest.param(SRUN | {"SLURM_LOCALID": "0"}, 3, 5, None, id="srun, dealt out, not listed"),
        pytest.param(
            SRUN | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "5"}, 3, 5, (2, 3), id="srun, step"
        ),
        pytest.param(SRUN, 3, 3, None, id="srun, but a group of its own"),
        pytest.param(
            SRUN | TORCHRUN, 5, 8, (4, 5, 6, 7), id="torchrun below srun, one task a node"
        ),
        pytest.param(OPEN_MPI, 1, 4, (0, 1, 2, 3), id="mpirun, one host"),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 4, None, id="mpirun, which two?"
        ),
        pytest.param(MPICH, 1, 4, (0, 1, 2, 3), id="mpiexec of MPICH, one host"),
        pytest.param(MPICH | {"MPI_LOCALNRANKS": "2"}, 1, 4, None, id="mpiexec of MPICH, two"),
        pytest.param({}, 1, 4, None, id="mp.spawn"),
        pytest.param({"SLURM_PROCID": "x", "RANK": ""}, 1, 4, None, id="nonsense"),
        pytest.param({}, 0, 1, (0,), id="one process"),
    ],
)
def test_launchers_are_believed_where_what_they_say_fits_together(
    environment, rank, world_size, expected
):
    assert ranks_here(environment, rank, world_size) == expected


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x2),1", [2, 2, 1]), ("8", [8]), ("1(x3)", [1, 1, 1]), ("", []), ("2(x", []), ("2;1", [])],
)
def test_tasks_per_node_are_read_as_slurm_writes_them(text, counts):
    assert tasks_per_node(text) == counts


def told(*about):
    return [line_of(rank, word, host) for rank, word, host in about]


def test_ranks_that_read_the_same_word_are_at_one_place():
    lines = told((2, "b", "n1"), (0, "a", "n0"), (3, "b", "n1"), (1, "a", "n0"))
    places = read_places(lines, 4)
    assert places.ranks == {"a": (0, 1), "b": (2, 3)}
    assert (places.of(1), places.of(2)) == ((0, 1), (2, 3))
    assert places.apart() == []


def test_nothing_is_known_until_all_have_told():
    lines = told((0, "a", "n0"), (1, "a", "n0"))
    assert read_places(lines, 3) is None
    assert read_places([*lines, line_of(2, "a", "n 0")], 3).ranks == {"a": (0, 1, 2)}


def test_containers_of_one_host_are_noticed_and_hosts_with_one_folder_are_no_places():
    containers = read_places(told((0, "a", "n0"), (1, "b", "n0"), (2, "c", "n1")), 3)
    assert containers.apart() == [(0,), (1,)]
    shared = read_places(told((0, "a", "n0"), (1, "a", "n1")), 2)
    assert shared.ranks == {"a": (0, 1)}


def test_all_ranks_of_a_folder_read_the_word_that_one_has_written(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    words = [word_of(Folder(here)), word_of(Folder(here)), word_of(Folder(there))]
    assert words[0] == words[1] != words[2]


def test_a_word_that_is_about_to_be_written_is_not_there_yet(tmp_path):
    Folder(tmp_path).claim("place")
    assert word_of(Folder(tmp_path)) is None


def test_a_claim_is_given_once_and_not_at_all_where_the_folder_is_gone(tmp_path):
    root = tmp_path / "met"
    root.mkdir()
    assert [Folder(root).claim("answered") for _ in range(3)] == [True, False, False]
    shutil.rmtree(root)
    assert Folder(root).claim("said") is False
    assert not root.exists()
