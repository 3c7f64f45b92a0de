"""SyncBatchNorm on CPU ranks against one process with nn.BatchNorm on the whole batch.

Nothing is compared with a tolerance. The floor is how far one process moves from its own float64
result when the order of the samples is permuted; what ranks compute has to stay at that floor.
Ranks are real gloo processes: this file runs itself, imports torch once and forks.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as StockFunction
from torch.nn.parallel import DistributedDataParallel

import harness.sync_batch_norm as under_test
from harness.collectives import count_collectives
from harness.floor import PERMUTATIONS, Floor, Scaling, Size, permutation_floor
from harness.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm, register_cpu_kernels
from harness.tables import relative_l2

WORLD = 4
STEPS = 3
EVEN, UNEVEN, EMPTY = (4, 4, 4, 4), (3, 1, 7, 5), (5, 0, 8, 3)
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
RESULTS = ("output", "input_grad", "weight_grad", "bias_grad", "running_mean", "running_var")


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (6, 3, 3)
    sizes: tuple[int, ...] = EVEN
    dtype: torch.dtype = torch.float32
    affine: bool = True
    momentum: float | None = 0.1
    tracked: bool = True
    channels_last: bool = False
    offset: float = 0.5
    deviation: float = 2.0

    def arrange(self, batch: Tensor) -> Tensor:
        if not self.channels_last or not batch.numel():
            return batch
        form = torch.channels_last if batch.dim() == 4 else torch.channels_last_3d
        return batch.contiguous(memory_format=form)

    def data(self) -> tuple[list[Tensor], list[Tensor]]:
        """The same global batches and output gradients on every rank and in the parent."""
        generator = torch.Generator().manual_seed(11)
        shape = (STEPS, sum(self.sizes), *self.shape)
        x, grad = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
        x = self.offset + self.deviation * x
        return list(x.to(self.dtype)), list(grad.to(self.dtype))

    def fill(self, norm: Any) -> Any:
        if self.affine:
            with torch.no_grad():
                norm.weight.copy_(torch.linspace(0.5, 2.0, self.shape[0]))
                norm.bias.copy_(torch.linspace(-1.0, 1.0, self.shape[0]))
        return norm

    def options(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "affine": self.affine,
            "track_running_stats": self.tracked,
        }


CASES = {
    "1d": Case(shape=(6,)),
    "1d_length": Case(shape=(6, 5)),
    "2d": Case(),
    "3d": Case(shape=(6, 2, 3, 2)),
    "uneven": Case(sizes=UNEVEN),
    "empty_rank": Case(sizes=EMPTY),
    "one_rank_has_all": Case(sizes=(0, 0, 9, 0)),
    "one_value_a_rank": Case(shape=(6,), sizes=(1, 1, 1, 1)),
    "channels_last": Case(channels_last=True, sizes=UNEVEN),
    "channels_last_3d": Case(shape=(6, 2, 3, 2), channels_last=True),
    "no_affine": Case(affine=False),
    "no_affine_empty_rank": Case(affine=False, sizes=EMPTY),
    "momentum_none": Case(momentum=None, sizes=UNEVEN),
    "untracked": Case(tracked=False),
    "double": Case(dtype=torch.float64, sizes=UNEVEN),
}


def step(norm: Any, case: Case, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = case.arrange(x.clone()).requires_grad_()
    norm.zero_grad(set_to_none=True)
    output = norm(x)
    output.backward(grad)
    # torch's function gives an empty batch no gradient at all, which stands for zeros.
    input_grad = torch.zeros_like(x) if x.grad is None else x.grad
    assert len(x) == 0 or x.grad is not None
    assert output.dtype == x.dtype == input_grad.dtype
    assert output.stride() == x.stride()
    found = {"output": output.detach(), "input_grad": input_grad}
    if case.affine:
        for name in ("weight", "bias"):
            own = getattr(norm, name).grad
            found[f"{name}_grad"] = torch.zeros(case.shape[0]).to(x) if own is None else own
    return found


def buffers(norm: Any, case: Case) -> dict[str, Tensor]:
    names = ("running_mean", "running_var", "num_batches_tracked") if case.tracked else ()
    return {name: getattr(norm, name).clone() for name in names}


def alone(case: Case, dtype: torch.dtype, order: Tensor | None = None) -> dict[str, Tensor]:
    """One process, nn.BatchNorm, the whole batch; rows come back in their original order."""
    norm = case.fill(PLAIN[len(case.shape) + 1](case.shape[0], dtype=dtype, **case.options()))
    order = torch.arange(sum(case.sizes)) if order is None else order
    for x, grad in zip(*case.data(), strict=True):
        found = step(norm, case, x[order].to(dtype), grad[order].to(dtype))
    for name in ("output", "input_grad"):
        found[name] = found[name][order.argsort()]
    return found | buffers(norm, case)


def distance(x: Tensor, y: Tensor) -> float:
    return relative_l2(x.double().flatten().numpy(), y.double().flatten().numpy())


def floors(case: Case) -> tuple[dict[str, Tensor], dict[str, Floor]]:
    truth = alone(case, torch.float64)
    generator = torch.Generator().manual_seed(5)
    orders = [torch.randperm(sum(case.sizes), generator=generator) for _ in range(PERMUTATIONS)]
    runs = [alone(case, case.dtype, order) for order in orders]
    # Where the sum is exact in any order, the one rounding of the result is left.
    least = torch.finfo(case.dtype).eps
    return truth, {
        name: permutation_floor([max(distance(run[name], truth[name]), least) for run in runs])
        for name in RESULTS
        if name in truth
    }


# What the ranks run ------------------------------------------------------------------------------


def on_rank(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=30),
    )
    found: dict[str, Any] = {name: sync(rank, case) for name, case in CASES.items()}
    found["bfloat16_empty_rank"] = halves(rank)
    found["collectives"] = collectives()
    found["refused"] = refusals(rank)
    for dtype in ("float32", "float64"):
        found[f"trained_{dtype}"] = train(getattr(torch, dtype), rank, wrapped=True)
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.barrier()
    # gloo's threads may abort a correct program while the interpreter shuts down.
    os._exit(0)


def mine(rank: int, sizes: tuple[int, ...], batch: Tensor) -> Tensor:
    return batch[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def sync(rank: int, case: Case) -> dict[str, Tensor]:
    norm = case.fill(SyncBatchNorm(case.shape[0], dtype=case.dtype, **case.options()))
    for x, grad in zip(*case.data(), strict=True):
        found = step(norm, case, mine(rank, case.sizes, x), mine(rank, case.sizes, grad))
    return found | buffers(norm, case)


def halves(rank: int) -> dict[str, Tensor]:
    case = Case(sizes=EMPTY)
    norm = SyncBatchNorm(6)
    x = mine(rank, case.sizes, case.data()[0][0]).bfloat16().requires_grad_()
    output = norm(x)
    output.sum().backward()
    return {"output": output.detach()} | buffers(norm, case)


def collectives() -> dict[str, list[str]]:
    norm, x = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    regions: dict[str, Callable[[], Any]] = {
        "forward": lambda: norm(x),
        "backward": lambda: output.backward(),
        "eval": lambda: norm.eval()(x).sum().backward(),
        "train_no_grad": lambda: norm.train()(x.detach()),
    }
    seen = {}
    for name, region in regions.items():
        with count_collectives() as calls:
            result = region()
        seen[name] = [call.op for call in calls.ops]
        output = result.sum() if name == "forward" else None
    return seen


def refusals(rank: int) -> dict[str, str]:
    said = {}
    attempts: dict[str, Callable[[], Any]] = {
        "one_value": lambda: SyncBatchNorm(3)(torch.ones(1 if rank == 2 else 0, 3)),
        "no_value": lambda: SyncBatchNorm(3)(torch.ones(0, 3)),
        "one_dimension": lambda: SyncBatchNorm(3)(torch.ones(3)),
        "no_channel": lambda: SyncBatchNorm(0)(torch.ones(2, 0)),
        "stock_module": lambda: nn.SyncBatchNorm(3)(torch.ones(2, 3)),
        "stock_in_ddp": lambda: DistributedDataParallel(nn.Sequential(nn.SyncBatchNorm(3))),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            said[name] = str(error)
    return said


def train(dtype: torch.dtype, rank: int, *, wrapped: bool) -> dict[str, Tensor]:
    """Five SGD steps of a small net; the global batch is the same however many ranks there are."""
    torch.manual_seed(3)
    net: nn.Module = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)
    ).to(dtype)
    if wrapped:
        net = DistributedDataParallel(convert_sync_batch_norm(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(8)
    for _ in range(5):
        x = torch.randn(sum(EMPTY), 2, 5, 5, generator=generator).to(dtype)
        y = torch.randint(3, (sum(EMPTY),), generator=generator)
        if wrapped:
            x, y = mine(rank, EMPTY, x), mine(rank, EMPTY, y)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum") / sum(EMPTY)
        # DDP averages the ranks' gradients; the sum of the shares is what one process has.
        (loss * WORLD if wrapped else loss).backward()
        optimizer.step()
    return {name.removeprefix("module."): value for name, value in net.state_dict().items()}


# What is true of it ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_computes(ranks: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    truth, floor = floors(case)
    parts = [rank[name] for rank in ranks]
    whole = {
        "output": torch.cat([part["output"] for part in parts]),
        "input_grad": torch.cat([part["input_grad"] for part in parts]),
    }
    if case.affine:
        for grad in ("weight_grad", "bias_grad"):
            whole[grad] = torch.stack([part[grad].double() for part in parts]).sum(0)
    whole |= {key: parts[0][key] for key in ("running_mean", "running_var") if case.tracked}
    assert set(whole) == set(floor)
    effects = {key: distance(value, truth[key]) for key, value in whole.items()}
    sizes = {key: floor[key].size(effect) for key, effect in effects.items()}
    assert set(sizes.values()) == {Size.CLEAN}, {
        key: (effects[key], str(floor[key])) for key, size in sizes.items() if size != Size.CLEAN
    }
    for part in parts[1:]:
        for key in buffers(PLAIN[len(case.shape) + 1](1), case):
            assert torch.equal(part[key], parts[0][key]), key


def test_the_gap_to_one_process_shrinks_with_the_dtype(ranks: list[dict[str, Any]]) -> None:
    gap = {}
    for dtype in ("float32", "float64"):
        truth = train(torch.float64, 0, wrapped=False)
        found = ranks[0][f"trained_{dtype}"]
        assert int(found["1.num_batches_tracked"]) == 5
        gap[dtype] = max(distance(found[name], truth[name]) for name in truth)
    scaling = Scaling(coarse=gap["float32"], fine=gap["float64"])
    assert scaling.shrinks_like_rounding, scaling


def test_ddp_keeps_parameters_and_statistics_equal_on_all_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks[1:]:
        for name, value in ranks[0]["trained_float32"].items():
            assert torch.equal(rank["trained_float32"][name], value), name


def test_one_gather_forward_one_reduce_backward_none_in_eval(ranks: list[dict[str, Any]]) -> None:
    expected = {
        "forward": ["all_gather"],
        "backward": ["all_reduce"],
        "eval": [],
        "train_no_grad": ["all_gather"],
    }
    assert [rank["collectives"] for rank in ranks] == [expected] * WORLD


def test_too_few_values_raise_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "got 1 on all ranks together" in rank["refused"]["one_value"]
        assert "got 0 on all ranks together" in rank["refused"]["no_value"]
        assert "at least 2D" in rank["refused"]["one_dimension"]
        assert "channels should be non-zero" in rank["refused"]["no_channel"]


def test_torch_itself_still_refuses_the_stock_module_on_cpu(ranks: list[dict[str, Any]]) -> None:
    """Once this fails, the module of this project has lost its reason."""
    for rank in ranks:
        assert "GPU" in rank["refused"]["stock_module"]
        assert "GPU" in rank["refused"]["stock_in_ddp"]


def test_halves_mix_with_an_empty_rank(ranks: list[dict[str, Any]]) -> None:
    case = Case(sizes=EMPTY)
    x = case.data()[0][0].bfloat16()
    plain = nn.BatchNorm2d(6)
    expected = plain(x.float()).detach()
    output = torch.cat([rank["bfloat16_empty_rank"]["output"] for rank in ranks])
    assert output.dtype == torch.bfloat16
    # Half a unit in the last place of bfloat16 for the result, and nothing else.
    assert torch.equal(output, expected.bfloat16()) or distance(output, expected) < 2.0**-9
    assert distance(ranks[0]["bfloat16_empty_rank"]["running_var"], plain.running_var) < 2.0**-22


# Without ranks -----------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    register_cpu_kernels()
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(5, 3), (3, 3, 2), (3, 2, 2, 2), (2, 2, 2, 1, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_pass_gradcheck(
    group: dist.ProcessGroup, shape: tuple[int, ...], affine: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    pair = [
        torch.randn(shape[1], dtype=torch.float64, requires_grad=True) if affine else None
        for _ in range(2)
    ]

    def normalise(x: Tensor, *pair: Tensor | None) -> Any:
        return StockFunction.apply(x, *pair, None, None, 1e-5, 0.1, group, 1)  # type: ignore[no-untyped-call]

    assert torch.autograd.gradcheck(normalise, (x, *pair))


def test_alone_it_is_plain_batch_norm_without_collectives(group: dist.ProcessGroup) -> None:
    x = torch.randn(6, 3, 2, 2)
    sync, plain = SyncBatchNorm(3), nn.BatchNorm2d(3)
    with count_collectives() as calls:
        for train in (True, False):
            assert torch.equal(sync.train(train)(x), plain.train(train)(x))
    assert torch.equal(sync.running_var, plain.running_var)
    assert calls.count() == 0


def merge(parts: list[Tensor], stats: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The arithmetic of one forward on len(parts) ranks, as the stock function strings it."""
    pairs = [stats(part, 1e-5) for part in parts]
    mean, var = torch.zeros_like(pairs[0][0]), torch.zeros_like(pairs[0][0])
    merged, invstd = torch.batch_norm_gather_stats_with_counts(
        parts[0],
        torch.stack([pair[0] for pair in pairs]),
        torch.stack([pair[1] for pair in pairs]),
        mean,
        var,
        1.0,
        1e-5,
        torch.tensor([float(len(part)) for part in parts]).to(mean.dtype),
    )
    output = torch.batch_norm_elemt(torch.cat(parts), None, None, merged, invstd, 1e-5)
    return {"running_mean": mean, "running_var": var, "output": output}


def large_mean(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    offset = 1e4 if dtype == torch.float32 else 1e8
    x = offset + 1e-2 * torch.randn(192, 4, generator=generator, dtype=torch.float64)
    return list(x.to(dtype).split([30, 2, 100, 60]))


def naive(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean = input.mean(0)
    return mean, ((input * input).mean(0) - mean * mean + eps).rsqrt()


def exact(parts: list[Tensor], sent: torch.dtype | None = None) -> dict[str, Tensor]:
    """The whole batch in rational arithmetic as far as float64 goes, taken about its first row.

    `sent` rounds each rank's mean and inverse deviation to a dtype: what the protocol itself costs.
    """
    first = parts[0][:1].double()
    moved = [part.double() - first for part in parts]
    if sent is None:
        x = torch.cat(moved)
        mean, square, count = x.mean(0), x.var(0, correction=0), len(x)
    else:
        counts = torch.tensor([[float(len(part))] for part in moved], dtype=torch.float64)
        means = torch.stack([(part.mean(0) + first[0]).to(sent).double() for part in moved])
        means = means - first
        stds = torch.stack([(part.var(0, correction=0) + 1e-5).rsqrt() for part in moved])
        count = int(counts.sum())
        mean = (counts * means).sum(0) / count
        inner = stds.to(sent).double() ** -2 - 1e-5
        square = (counts * (inner + (means - mean) ** 2)).sum(0) / count
        mean = (mean + first[0]).to(sent).double() - first[0]
    return {
        "running_var": square * count / (count - 1),
        "output": (torch.cat(moved) - mean) * (square + 1e-5).rsqrt(),
    }


def large_mean_sizes(
    stats: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype
) -> dict[str, Size]:
    batches = [large_mean(seed, dtype) for seed in range(PERMUTATIONS)]
    truth, found = exact(batches[0]), merge(batches[0], stats)
    paid = [(exact(parts, dtype), exact(parts)) for parts in batches]
    return {
        name: permutation_floor([distance(sent[name], true[name]) for sent, true in paid]).size(
            distance(found[name], truth[name])
        )
        for name in truth
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_mean_costs_no_more_than_the_protocol(dtype: torch.dtype) -> None:
    register_cpu_kernels()
    assert set(large_mean_sizes(torch.batch_norm_stats, dtype).values()) == {Size.CLEAN}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_difference_of_squares_would_fail_that(dtype: torch.dtype) -> None:
    register_cpu_kernels()
    assert set(large_mean_sizes(naive, dtype).values()) == {Size.FAULT}


def test_normalising_keeps_every_digit_beside_a_large_mean() -> None:
    register_cpu_kernels()
    # 2^14 and multiples of 2^-9 are float32 numbers, and so is each exact result.
    small = torch.arange(-8.0, 8.0).reshape(16, 1) * 2.0**-9
    mean, invstd, bias = torch.tensor([2.0**14]), torch.tensor([96.0]), torch.tensor([0.5])
    found = torch.batch_norm_elemt(mean + small, None, bias, mean, invstd, 1e-5)
    assert torch.equal(found, small * 96.0 + 0.5)


@pytest.mark.parametrize("seed", range(10))
def test_any_split_merges_to_the_whole(seed: int) -> None:
    register_cpu_kernels()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(50, 3, generator=generator, dtype=torch.float64) * 3 - 7
    cuts = torch.randint(1, 49, (seed,), generator=generator).unique().tolist()
    parts = [part for part in x.tensor_split(cuts) if len(part)]
    whole, split = merge([x], torch.batch_norm_stats), merge(parts, torch.batch_norm_stats)
    for name in whole:
        # 50 values, each rounded a few times: the error of a sum is at most n units.
        assert distance(split[name], whole[name]) <= 50 * torch.finfo(torch.float64).eps, name
    assert torch.equal(x.var(0).argsort(), split["running_var"].argsort())


def test_constant_and_broken_channels() -> None:
    register_cpu_kernels()
    x = torch.randn(8, 3)
    x[:, 0] = 7.0
    x[3, 1] = float("nan")
    found = merge(list(x.split([3, 5])), torch.batch_norm_stats)
    # eps rounded to float32 on its way through invstd is all that a variance of 0 may become.
    assert 0.0 <= float(found["running_var"][0]) <= 1e-5 * 2 * torch.finfo(torch.float32).eps
    assert found["running_var"][1].isnan()
    assert found["output"][:, 0].eq(0).all()
    assert found["output"][:, 2].isfinite().all()


def test_registering_again_adds_nothing() -> None:
    register_cpu_kernels()
    before = len(under_test._LIBRARIES)
    register_cpu_kernels()
    SyncBatchNorm(2)
    assert len(under_test._LIBRARIES) == before


def test_a_kernel_that_torch_has_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def native_batch_norm() -> None:
        raise AssertionError("replaced torch's own kernel")

    monkeypatch.setattr(under_test, "_KERNELS", [native_batch_norm])
    register_cpu_kernels()
    nn.BatchNorm1d(2)(torch.randn(3, 2))


def test_convert_moves_the_very_same_tensors() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 1),
        nn.Sequential(nn.BatchNorm2d(2, eps=0.1, momentum=None), nn.LayerNorm(2)),
        nn.BatchNorm2d(2, affine=False, track_running_stats=False, dtype=torch.float64),
    ).eval()
    inner = net[1][0]
    state = {name: value.data_ptr() for name, value in net.state_dict().items()}
    held = list(net.parameters())
    converted = convert_sync_batch_norm(net)
    assert converted is net
    assert {name: value.data_ptr() for name, value in net.state_dict().items()} == state
    assert all(a is b for a, b in zip(net.parameters(), held, strict=True))
    assert type(net[1][0]) is type(net[2]) is SyncBatchNorm
    assert (net[1][0].eps, net[1][0].momentum, net[1][0].training) == (0.1, None, False)
    assert (net[2].affine, net[2].running_var) == (False, None)
    assert type(net[1][1]) is nn.LayerNorm
    bare = convert_sync_batch_norm(inner)
    assert type(bare) is SyncBatchNorm
    assert bare.weight is inner.weight


def test_loops_over_types_meet_it_where_they_meet_the_stock_module() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.modules.batchnorm._BatchNorm):
        assert issubclass(SyncBatchNorm, kind) is issubclass(nn.SyncBatchNorm, kind)


def test_convert_takes_the_stock_module_for_a_gpu() -> None:
    assert type(convert_sync_batch_norm(nn.BatchNorm1d(2), device="cuda:0")) is nn.SyncBatchNorm


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_agree_with_cuda() -> None:
    register_cpu_kernels()
    parts = [part + 3 for part in torch.randn(24, 4, dtype=torch.float64).split([5, 19])]
    here = merge(parts, torch.batch_norm_stats)
    pairs = [torch.batch_norm_stats(part.cuda(), 1e-5) for part in parts]
    mean, var = (torch.zeros(4, dtype=torch.float64, device="cuda") for _ in range(2))
    torch.batch_norm_gather_stats_with_counts(
        parts[0].cuda(),
        torch.stack([pair[0] for pair in pairs]),
        torch.stack([pair[1] for pair in pairs]),
        mean,
        var,
        1.0,
        1e-5,
        torch.tensor([5.0, 19.0], dtype=torch.float64, device="cuda"),
    )
    eps = torch.finfo(torch.float64).eps
    assert distance(here["running_mean"], mean.cpu()) <= 24 * eps
    assert distance(here["running_var"], var.cpu()) <= 24 * eps


if __name__ == "__main__":
    forks = multiprocessing.get_context("fork")
    processes = [forks.Process(target=on_rank, args=(k, sys.argv[1])) for k in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))
