"""The collective counter against real gloo ranks: every source, exact bytes, nothing disturbed."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.multiprocessing.spawn import spawn

from harness.collectives import _NAMES, _NO_COLLECTIVE, Calls, count_collectives
from harness.fingerprint import fingerprint

WORLD = 2
WIDTH = 6
NUMEL = WIDTH * WIDTH + WIDTH


def observe(region: Callable[[], object]) -> list[list[Any]]:
    with count_collectives() as calls:
        region()
    return [[op.op, op.numel, op.bytes, op.dtype, list(op.shape)] for op in calls.ops]


class Gather(torch.autograd.Function):
    """Communicates in forward and backward as SyncBatchNorm's function does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total.chunk(WORLD)[dist.get_rank()]


def python_calls(rank: int) -> dict[str, Callable[[], object]]:
    x = torch.ones(3, 5)
    other = 1 - rank

    def coalesced() -> None:
        with _coalescing_manager():
            dist.all_reduce(x)
            dist.all_reduce(x)

    return {
        "nothing": lambda: x.add(1).sum(),
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "all_reduce of float64": lambda: dist.all_reduce(x.double()),
        "all_reduce of bfloat16": lambda: dist.all_reduce(x.bfloat16()),
        "coalesced": coalesced,
        "all_gather": lambda: dist.all_gather([x.clone() for _ in range(WORLD)], x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(6, 5), x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            torch.empty(3, 5), torch.ones(6, 5)
        ),
        "broadcast": lambda: dist.broadcast(x, 1),
        "reduce": lambda: dist.reduce(x, 1),
        "gather": lambda: dist.gather(x, [x.clone() for _ in range(WORLD)] if rank == 0 else None),
        "scatter": lambda: dist.scatter(
            x.clone(), [x.clone() for _ in range(WORLD)] if rank == 0 else None
        ),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4)),
        "barrier": dist.barrier,
        "send and recv": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
        "exchange": lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, x.clone(), other)]
            )
        ],
        "object": lambda: dist.all_gather_object([None] * WORLD, "four"),
        "autograd function": lambda: (
            Gather.apply(  # type: ignore[no-untyped-call]
                torch.ones(4, requires_grad=True)
            )
            .sum()
            .backward()
        ),
    }


def functional_calls() -> dict[str, Callable[[], object]]:
    import torch.distributed._functional_collectives as functional

    x, group = torch.ones(3, 5), list(range(WORLD))
    compiled = torch.compile(
        lambda value: functional.all_reduce(value, "sum", group) + 1, backend="eager"
    )
    compiled(x)
    return {
        "functional all_reduce": lambda: functional.all_reduce(x, "sum", group).sum(),
        "functional all_gather": lambda: functional.all_gather_tensor(x, 0, group).sum(),
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(
            torch.ones(6, 5), "sum", 0, group
        ).sum(),
        "functional all_to_all": lambda: functional.all_to_all_single(
            torch.ones(4, 3), [1, 1] if dist.get_rank() else [3, 3], [3, 1], group
        ).sum(),
        "compiled all_reduce": lambda: compiled(x).sum(),
    }


def forward_backward(model: nn.Module, data: torch.Tensor) -> Callable[[], object]:
    return lambda: model(data).square().sum().backward()


def wrapped_calls() -> dict[str, Callable[[], object]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, Partial

    data = torch.ones(4, WIDTH)
    mesh = init_device_mesh("cpu", (WORLD,))
    ddp = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False))
    )
    # Two passes: the second is where DDP has rebuilt its buckets and broadcasts buffers.
    for _ in range(2):
        ddp(data).sum().backward()
    fsdp1 = FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), device_id=torch.device("cpu"))
    fsdp2 = nn.Linear(WIDTH, WIDTH)
    fully_shard(fsdp2, mesh=mesh)
    partial = DTensor.from_local(torch.ones(7), mesh, [Partial()])
    calls: dict[str, Callable[[], object]] = {
        "DDP constructor": lambda: nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH)),
        "DDP forward": lambda: ddp(data),
        "DDP backward": lambda: ddp(data).sum().backward(),
        "DTensor": partial.full_tensor,
    }
    for name, model in {"FSDP1": fsdp1, "FSDP2": fsdp2}.items():
        calls[f"{name} step"] = forward_backward(model, data)
    calls["FSDP1 clip"] = lambda: fsdp1.clip_grad_norm_(1.0)
    calls["FSDP2 clip"] = lambda: nn.utils.clip_grad_norm_(fsdp2.parameters(), 1.0)
    return calls


def train(rank: int, kind: str, *, watched: bool) -> list[str]:
    """Return the bits of losses, parameters, buffers and optimizer state of five steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))
    model: nn.Module = inner
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(inner)
    else:
        fully_shard(inner, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    bits = []

    def step() -> None:
        loss = model(torch.randn(8, 5) + rank).logsumexp(1).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        bits.append(fingerprint(loss.detach().reshape(1)).digest)

    for _ in range(5):
        if watched:
            with count_collectives():
                step()
        else:
            step()
    tensors = [*inner.parameters(), *inner.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    local = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]
    bits += [fingerprint(tensor.reshape(-1)).digest for tensor in local]
    return [*bits, fingerprint(torch.get_rng_state()).digest]


def failing() -> tuple[int, int]:
    with pytest.raises(RuntimeError), count_collectives() as calls:
        dist.reduce_scatter_tensor(torch.empty(3), torch.ones(7))
    with count_collectives() as after:
        torch.ones(1)
    dist.all_reduce(torch.ones(1))
    return calls.count(), after.count()


def worker(rank: int, port: int, folder: str) -> None:
    store = TCPStore("127.0.0.1", port, WORLD, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    sources = {name: observe(call) for name, call in python_calls(rank).items()}
    light = "torch._dynamo" not in sys.modules
    for name, call in {**functional_calls(), **wrapped_calls()}.items():
        sources[name] = observe(call)
    result = {
        "sources": sources,
        "light": light,
        "failing": failing(),
        "training": {
            kind: [train(rank, kind, watched=watched) for watched in (False, True)]
            for kind in ("DDP", "FSDP2")
        },
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("collectives")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn(worker, (port, str(folder)), nprocs=WORLD)  # type: ignore[no-untyped-call]
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(WORLD)]


MESSAGE = ["float32", [3, 5]]
EXPECTED: dict[str, list[list[Any]]] = {
    "nothing": [],
    "all_reduce": [["all_reduce", 15, 60, *MESSAGE]],
    "all_reduce async": [["all_reduce", 15, 60, *MESSAGE]],
    "all_reduce of float64": [["all_reduce", 15, 120, "float64", [3, 5]]],
    "all_reduce of bfloat16": [["all_reduce", 15, 30, "bfloat16", [3, 5]]],
    "coalesced": [["all_reduce", 30, 120, "float32", [30]]],
    "all_gather": [["all_gather", 30, 120, "float32", [30]]],
    "all_gather_into_tensor": [["all_gather", 30, 120, "float32", [6, 5]]],
    "reduce_scatter_tensor": [["reduce_scatter", 30, 120, "float32", [6, 5]]],
    "broadcast": [["broadcast", 15, 60, *MESSAGE]],
    "reduce": [["reduce", 15, 60, *MESSAGE]],
    "all_to_all": [["all_to_all", 4, 16, "float32", [4]]],
    "barrier": [["barrier", 0, 0, "", [0]]],
    "autograd function": [
        ["all_gather", 8, 32, "float32", [8]],
        ["all_reduce", 8, 32, "float32", [8]],
    ],
    "functional all_reduce": [["all_reduce", 15, 60, *MESSAGE]],
    "functional all_gather": [["all_gather", 30, 120, "float32", [6, 5]]],
    "functional reduce_scatter": [["reduce_scatter", 30, 120, "float32", [6, 5]]],
    "compiled all_reduce": [["all_reduce", 15, 60, *MESSAGE]],
    # running_mean and running_var in one message, num_batches_tracked (int64) in another.
    "DDP forward": [
        ["broadcast", 2 * WIDTH, 8 * WIDTH, "float32", [2 * WIDTH]],
        ["broadcast", 1, 8, "int64", [1]],
    ],
    "DDP backward": [
        ["broadcast", 2 * WIDTH, 8 * WIDTH, "float32", [2 * WIDTH]],
        ["broadcast", 1, 8, "int64", [1]],
        ["all_reduce", NUMEL, 4 * NUMEL, "float32", [NUMEL]],
    ],
    "DTensor": [["all_reduce", 7, 28, "float32", [7]]],
    "FSDP1 clip": [["all_reduce", 1, 4, "float32", []]],
    # The norms of weight and bias travel side by side.
    "FSDP2 clip": [["all_reduce", 2, 8, "float32", [2]]],
    **{
        f"{name} step": [
            ["all_gather", NUMEL, 4 * NUMEL, "float32", [NUMEL]],
            ["reduce_scatter", NUMEL, 4 * NUMEL, "float32", [NUMEL]],
        ]
        for name in ("FSDP1", "FSDP2")
    },
}


@pytest.mark.parametrize("source", EXPECTED)
def test_every_source_is_seen_on_every_rank(seen: list[dict[str, Any]], source: str) -> None:
    for rank in range(WORLD):
        assert seen[rank]["sources"][source] == EXPECTED[source]


def test_ranks_with_different_parts_in_one_collective(seen: list[dict[str, Any]]) -> None:
    def at(rank: int, source: str) -> list[list[Any]]:
        got = seen[rank]["sources"][source]
        assert isinstance(got, list)
        return got

    assert at(0, "send and recv") == [["send", 15, 60, *MESSAGE]]
    assert at(1, "send and recv") == [["recv", 15, 60, *MESSAGE]]
    assert sorted(op[0] for op in at(0, "exchange")) == ["recv", "send"]
    assert at(0, "gather") == [["gather", 30, 120, "float32", [30]]]
    assert at(1, "gather") == [["gather", 15, 60, *MESSAGE]]
    assert at(0, "scatter") == [["scatter", 30, 120, "float32", [30]]]
    assert at(1, "scatter") == [["scatter", 15, 60, *MESSAGE]]
    # Rank 0 hands in 4 rows and gets 6 back, rank 1 hands in 4 and gets 2.
    assert at(0, "functional all_to_all") == [["all_to_all", 18, 72, "float32", [6, 3]]]
    assert at(1, "functional all_to_all") == [["all_to_all", 12, 48, "float32", [4, 3]]]


def test_objects_are_two_messages_sizes_then_bytes(seen: list[dict[str, Any]]) -> None:
    sizes, payload = seen[0]["sources"]["object"]
    assert sizes == ["all_gather", WORLD, 8 * WORLD, "int64", [WORLD]]
    assert payload[0] == "all_gather"
    assert payload[1] == payload[2] > WORLD * len("four")


def test_ddp_constructor_sends_shapes_and_parameters(seen: list[dict[str, Any]]) -> None:
    ops = seen[0]["sources"]["DDP constructor"]
    assert ["broadcast", NUMEL, 4 * NUMEL, "float32", [NUMEL]] in ops


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_training_is_bit_identical_under_the_counter(seen: list[dict[str, Any]], kind: str) -> None:
    for rank in range(WORLD):
        bare, watched = seen[rank]["training"][kind]
        assert len(bare) > 15
        assert bare == watched
    # The comparison can fail: the ranks draw different data, so their losses differ.
    assert seen[0]["training"][kind][0][0] != seen[1]["training"][kind][0][0]


def test_a_collective_that_raises_is_counted_and_the_region_ends(
    seen: list[dict[str, Any]],
) -> None:
    assert [result["failing"] for result in seen] == [[1, 0]] * WORLD


def test_the_counter_does_not_import_the_compiler(seen: list[dict[str, Any]]) -> None:
    assert all(result["light"] for result in seen)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_nested_regions_both_count(alone: None) -> None:
    with count_collectives() as outer:
        dist.all_reduce(torch.ones(2))
        with count_collectives() as inner:
            dist.broadcast(torch.ones(3), 0)
    assert [op.op for op in outer.ops] == ["all_reduce", "broadcast"]
    assert [op.op for op in inner.ops] == ["broadcast"]


def test_counts_and_bytes_by_kind(alone: None) -> None:
    calls = Calls()
    assert (calls.count(), calls.bytes(), calls.ops) == (0, 0, ())
    with count_collectives() as calls:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        dist.broadcast(torch.ones(5), 0)
    assert (calls.count(), calls.bytes()) == (3, 8 + 16 + 20)
    assert (calls.count("all_reduce"), calls.bytes("all_reduce")) == (2, 24)
    assert (calls.count("gather"), calls.bytes("gather")) == (0, 0)


def test_every_operator_of_torch_that_takes_a_group_has_a_name() -> None:
    known = _NAMES.keys() | _NO_COLLECTIVE
    spaces = ("c10d", "_c10d_functional")
    schemas = [schema.name.split("::") for schema in torch._C._jit_get_all_schemas()]
    operators = {name for space, name in schemas if space in spaces}
    assert {"allreduce_", "all_gather_into_tensor"} <= operators
    assert operators <= known, "name these operators in harness/collectives.py"
