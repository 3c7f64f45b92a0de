"""Each instrument of the bookkeeping records what a small program does, and changes none of it."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import random
import subprocess
import sys
import warnings

import numpy.random
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

from harness.causes.loss_terms import main_term
from harness.watch.instruments.backward import Backward
from harness.watch.instruments.bookkeeping import Bookkeeping
from harness.watch.instruments.by_hand import ByHand
from harness.watch.instruments.context import Context
from harness.watch.instruments.draws import PASSES
from harness.watch.instruments.forward_hooks import before_forward
from harness.watch.instruments.loads import Loads
from harness.watch.instruments.loss_terms import terms
from harness.watch.instruments.parameters import Held, Parameters
from harness.watch.instruments.patches import Patches
from harness.watch.instruments.random_state import random_state
from harness.watch.instruments.rows import Choice, batch_of, row_digests, sample_digests
from harness.watch.journal import Journal, read_journal
from harness.watch.layout import GRADIENTS
from harness.watch.modules import Modules
from harness.watch.stream import Stream as OptimizerStream
from harness.watch.updates import MOST as MOST_OPTIMIZERS
from harness.watch.watcher import Watcher
from tests.watching import ROOT


class Observed:
    """The instruments around a training loop that tells them of its updates, as a watcher does."""

    def __init__(self, path):
        self._path = path
        self._journal = Journal()
        self._journal.open(path)
        self.notes = []
        self._modules = Modules(lambda *_: None)
        self.context = Context(self._journal, self._modules, self.notes.append)
        self.instruments = Bookkeeping(self.context)
        self._backward = Backward(self.context)
        self._numbers = {}
        self._updates = {}

    def step(self, optimizer, closure=None):
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        update = self._updates.get(number, 0)
        self.instruments.before_update(number, optimizer, update)
        self._backward.before_update(number, optimizer)
        optimizer.step(closure)
        self._backward.after_update(number, optimizer)
        self.instruments.after_update(number)
        self._updates[number] = update + 1
        window = self.context.window.take(number, update)
        if window:
            self._journal.write("update", optimizer=number, update=update, **window)
        self.context.updates += 1
        self._journal.step = self.context.updates

    def close(self):
        self.context.closed = True
        self.instruments.close()
        self._backward.close()
        self._modules.close()

    def events(self, kind):
        assert self.notes == []
        return [event for event in read_journal(self._path) if event["kind"] == kind]


@pytest.fixture(autouse=True)
def _seed():
    """A net whose units are all dead has no gradients to tell apart."""
    torch.manual_seed(0)


@pytest.fixture
def observed(tmp_path):
    made = Observed(tmp_path / "journal.jsonl")
    yield made
    made.close()


def small(rate=0.1):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return net, torch.optim.SGD(net.parameters(), lr=rate)


def train(observed, net, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        observed.step(optimizer)


def labelled(count):
    return TensorDataset(torch.randn(count, 3), torch.arange(count) % 2)


# What loaders hand out.


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_has_its_indices_their_content_and_its_updates(observed, workers):
    net, optimizer = small()
    data = labelled(22)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=7)
    train(observed, net, optimizer, DataLoader(data, 4, sampler=sampler, num_workers=workers))
    (event,) = observed.events("pass")
    assert event["updates"] == {"0": 3}
    assert event["indices"] == sorted(sampler)
    assert event["batch_sizes"] == [3, 4]
    content = dict(event["content"])
    assert content == dict(zip(sampler, row_digests(data.tensors[0][list(sampler)]), strict=True))
    assert (event["seed"], event["epoch"], event["num_replicas"], event["rank"]) == (7, 0, 2, 1)
    assert (event["samplers_length"], event["total_size"]) == (22, 22)


def test_the_order_is_the_same_for_the_same_order_only(observed):
    data = labelled(20)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, 4, sampler=sampler)
    for epoch in (0, 0, 1):
        sampler.set_epoch(epoch)
        list(loader)
    first, second, third = (event["order"] for event in observed.events("pass"))
    assert first == second != third


def test_persistent_workers_begin_a_pass_for_each_epoch(observed):
    loader = DataLoader(labelled(8), 4, num_workers=1, persistent_workers=True)
    for _ in range(2):
        list(loader)
    del loader
    assert [event["count"] for event in observed.events("pass")] == [8, 8]


def test_an_evaluation_within_an_epoch_is_credited_with_no_update(observed):
    net, optimizer = small()
    # Its iterator is alive for as long as the loader is.
    held_out = DataLoader(labelled(6), 3, num_workers=1, persistent_workers=True)
    for x, y in DataLoader(labelled(8), 4):
        with torch.no_grad():
            list(held_out)
        F.cross_entropy(net(x), y).backward()
        observed.step(optimizer)
    del held_out
    credited = {event["length"]: event["updates"] for event in observed.events("pass")}
    assert credited == {8: {"0": 2}, 6: {}}


def test_what_a_subset_hands_out_is_known_by_its_place_in_the_whole(observed):
    whole = labelled(12)
    list(DataLoader(Subset(Subset(whole, [9, 7, 5, 3]), [0, 2]), 2))
    (event,) = observed.events("pass")
    assert event["within"] == [5, 9]
    assert event["whole_length"] == 12


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(6, 3))


def test_a_stream_has_no_indices_and_keys_are_no_numbers(observed):
    list(DataLoader(Stream(), 2))
    list(DataLoader({"a": 1.0, "b": 2.0}, 1, sampler=["a", "b"]))
    stream, keyed = observed.events("pass")
    assert stream["style"] == "iterable"
    assert "count" not in stream
    assert "count" not in keyed
    assert (stream["batches"], keyed["batches"]) == (3, 2)


def test_a_choice_is_small_and_the_same_for_the_same_indices():
    backwards, strided = Choice(64), Choice(64)
    for index in reversed(range(10_000)):
        backwards.put(index)
    for start in range(4):
        for index in range(start, 10_000, 4):
            strided.put(index)
    assert backwards.kept.keys() == strided.kept.keys()
    assert 16 <= len(backwards.kept) <= 64
    # No share of a strided sampler goes without.
    assert {index % 4 for index in backwards.kept} == {0, 1, 2, 3}


def test_rows_are_told_apart_by_content_shape_and_type():
    rows = torch.arange(12.0).view(3, 4)
    digests = row_digests(rows)
    assert len(set(digests)) == 3
    assert row_digests(rows[[2, 0]]) == [digests[2], digests[0]]
    assert row_digests(rows, [1]) == [digests[1]]
    assert row_digests(rows.t().contiguous().t()) == digests
    assert row_digests(rows.view(3, 2, 2))[0] != digests[0]
    assert row_digests(rows.view(torch.int32))[0] != digests[0]
    assert row_digests(rows.flip(1))[0] != digests[0]


def test_a_batch_is_found_where_it_is():
    rows = torch.zeros(5, 2)
    assert batch_of({"mask": None, "ids": [torch.tensor(3.0), rows]}) is rows
    assert batch_of([torch.zeros(4), rows], rows=5) is rows
    assert batch_of(["text", 3]) is None


def test_samples_are_told_apart_by_all_that_belongs_to_them():
    positions, tokens = torch.arange(6).expand(3, 6), torch.arange(18).view(3, 6)
    digests = sample_digests([(positions, tokens), {"scale": torch.ones(1)}])
    assert len(set(digests)) == 3
    assert sample_digests([(positions, tokens + 1), {}]) != digests
    assert sample_digests([(positions,), {}]) == row_digests(positions)
    assert sample_digests([("text",), {}]) == []


# Randomness.


def test_looking_at_the_random_state_draws_nothing_and_sees_every_draw():
    torch.manual_seed(0)
    before, drawn = random_state(), torch.get_rng_state()
    assert random_state() == before
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.rand(1)
    assert random_state()["torch"] != before["torch"]
    assert random_state()["python"] == before["python"]


def test_a_state_is_restored_by_the_script_not_by_checkpointing(observed):
    layer = nn.Dropout(0.5)
    state = torch.get_rng_state()
    checkpoint(layer, torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
    with torch.random.fork_rng():
        torch.rand(1)
    assert observed.events("restored") == []
    torch.set_rng_state(state)
    (event,) = observed.events("restored")
    assert event["at"].startswith(__file__)


def test_forward_passes_are_seen_with_their_rows_and_their_randomness(observed):
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = labelled(12)
    train(observed, net, optimizer, DataLoader(data, 4))
    net.eval()
    net(data.tensors[0])
    # Found when its optimizer makes the first update, so seen from the second one on.
    seen = observed.events("inputs")
    assert [event["update"] for event in seen] == [1, 2]
    assert seen[0]["rows"] == row_digests(data.tensors[0][4:8])
    assert seen[0]["random"] == ["Dropout"]
    assert seen[0]["before"]["torch"] != seen[0]["after"]["torch"]
    assert seen[0]["before"]["python"] == seen[0]["after"]["python"]


# Schedules.


def test_a_forward_pass_within_a_transform_has_no_values_to_look_at(observed):
    net, optimizer = small()
    params = dict(net.named_parameters())

    def loss(given, x):
        return torch.func.functional_call(net, given, (x,)).square().sum()

    for _ in range(4):
        plain = {name: p.detach() for name, p in params.items()}
        rows = torch.func.vmap(torch.func.grad(loss), (None, 0))(plain, torch.ones(3, 2, 3))
        for name, parameter in params.items():
            parameter.grad = rows[name].sum(0)
        observed.step(optimizer)
    assert observed.events("inputs") == []
    net(torch.ones(2, 3)).sum().backward()
    assert len(observed.events("inputs")) == 1


@pytest.mark.parametrize("times", [1, 3])
def test_scheduler_steps_are_counted_per_update(observed, times):
    _, optimizer = small()
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    for _ in range(5):
        observed.step(optimizer)
        for _ in range(times):
            schedule.step()
    observed.close()
    (event,) = observed.events("schedule")
    assert event["per_update"] == [[times, 4]]
    assert (event["total"], event["updates"]) == (40, 5)


def test_a_schedule_of_schedules_steps_once_and_plateaus_once_an_epoch(observed):
    _, optimizer = small()
    warm = lr_scheduler.LinearLR(optimizer, total_iters=2)
    flat = lr_scheduler.ConstantLR(optimizer, factor=1.0)
    both = lr_scheduler.SequentialLR(optimizer, [warm, flat], milestones=[2])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    for update in range(4):
        observed.step(optimizer)
        both.step()
        if update == 1:
            plateau.step(1.0)
    observed.close()
    counted = {event["class"]: event["per_update"] for event in observed.events("schedule")}
    assert counted["SequentialLR"] == [[1, 3]]
    assert counted["ReduceLROnPlateau"] == [[0, 1], [1, 1]]


def test_the_end_of_a_schedule_is_the_first_rate_of_zero_that_stays(observed):
    _, optimizer = small()
    rates = [0.0, 0.1, 0.0, 0.1, 0.0, 0.0]
    schedule = lr_scheduler.LambdaLR(optimizer, lambda n: rates[n] * 10)
    for _ in rates[:-1]:
        observed.step(optimizer)
        schedule.step()
    observed.step(optimizer)
    observed.close()
    assert observed.events("schedule")[0]["zero_from"] == 4


# Clips and loss scales.


@pytest.mark.parametrize("unscales", [True, False])
def test_a_clip_is_seen_with_its_norm_and_the_scale_of_the_gradients(observed, unscales):
    net, optimizer = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(net(torch.ones(2, 3)).square().mean()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    gradients = torch.cat([p.grad.flatten() for p in net.parameters()])
    before = float(gradients.norm())
    nn.utils.clip_grad_norm_(net.parameters(), 0.01 * before)
    observed.step(optimizer)
    ((clip,), event) = (observed.events("clip")[0]["clips"], observed.events("clip")[0])
    assert clip["norm"] == pytest.approx(before)
    assert clip["scale"] == (None if unscales else 1024.0)
    assert event["norm"] == pytest.approx(0.01 * before, rel=1e-3)


def test_a_clip_is_seen_with_the_backward_passes_before_it(observed):
    net, optimizer = small()
    for late in (False, True, False):
        net(torch.ones(2, 3)).sum().backward()
        if not late:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        observed.step(optimizer)
        if late:
            nn.utils.clip_grad_value_(net.parameters(), 0.1)
    counts = [[c["backwards"] for c in event["clips"]] for event in observed.events("clip")]
    assert counts == [[1], [0, 1]]


def test_a_scale_counts_for_its_own_update_only(observed):
    net, optimizer = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(net(torch.ones(2, 3)).mean()).backward()
    observed.step(optimizer)
    net(torch.ones(2, 3)).mean().backward()
    nn.utils.clip_grad_value_(net.parameters(), 0.5)
    observed.step(optimizer)
    (clip,) = observed.events("clip")[0]["clips"]
    assert (clip["kind"], clip["bound"], clip["scale"]) == ("value", 0.5, None)


# Losses.

LOGITS = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
LABELS = torch.tensor([0, 1, -100, 2, 3, -100])
VALID = LABELS != -100
TARGET = torch.zeros(6, 5)
LOSSES = {
    # loss: weight of each unit, number of units, whether it is a mean
    "labels ignored": (lambda x: F.cross_entropy(x, LABELS), 1 / 4, 4, True),
    "module": (lambda x: nn.CrossEntropyLoss()(x, LABELS), 1 / 4, 4, True),
    "summed": (
        lambda x: F.cross_entropy(x, LABELS, reduction="sum") * 2 / VALID.sum(),
        0.5,
        4,
        False,
    ),
    "masked": (
        lambda x: (F.cross_entropy(x, LABELS, reduction="none") * VALID).sum() / 4,
        1 / 4,
        6,
        False,
    ),
    "smoothed": (
        lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1),
        0.9 / 4,
        4,
        True,
    ),
    "squares": (lambda x: F.mse_loss(x, TARGET) * 3, 3 / 30, 30, True),
    "squares by hand": (lambda x: (x - TARGET).pow(2).mean(), 1 / 30, 30, True),
    "doubled mean": (lambda x: F.mse_loss(x, TARGET).mean() / 4, 1 / 120, 30, True),
    "bits": (lambda x: F.binary_cross_entropy_with_logits(x, TARGET), 1 / 30, 30, True),
    "half precision": (lambda x: F.smooth_l1_loss(x.double(), TARGET.double()), 1 / 30, 30, True),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_graph_tells_the_weight_of_a_unit(name):
    loss, weight, count, mean = LOSSES[name]
    main = main_term({"loss_terms": [terms(loss(LOGITS.clone().requires_grad_()))]})
    assert main.weight == pytest.approx(weight)
    assert main.count == count
    assert main.mean is mean


def test_the_terms_of_a_sum_have_factors_of_their_own():
    x = LOGITS.clone().requires_grad_()
    loss = (0.5 * F.mse_loss(x, TARGET) + F.cross_entropy(x, LABELS)) / 3
    first, second = sorted(terms(loss))
    assert (first[0], first[3]) == ("MseLoss", pytest.approx(1 / 6))
    assert (second[0], second[3]) == ("NllLoss", pytest.approx(1 / 3))
    assert first[6] == (("Div", 3.0), ("Mul", 0.5))


def test_class_weights_are_said():
    x = LOGITS.clone().requires_grad_()
    ((*_, weighted, _),) = terms(F.cross_entropy(x, LABELS, weight=torch.arange(1.0, 6.0)))
    assert weighted


def test_reading_a_graph_runs_no_hook_of_the_users():
    unpacked = []
    x = LOGITS.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked.append):
        loss = F.cross_entropy(x, LABELS) * torch.tensor(2.0)
    terms(loss)
    assert unpacked == []


def test_the_losses_of_an_update_are_in_its_window_with_their_scale(observed):
    net, optimizer = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(F.mse_loss(net(torch.ones(2, 3)), torch.zeros(2, 2))).backward()
    observed.step(optimizer)
    (window,) = observed.events("update")
    assert window["loss_terms"] == [[["MseLoss", 2.0, 4.0, 8.0, True, False, [["Mul", 8.0]]]]]
    assert window["loss_scales"] == [8.0]


# Instruments that fail.


@pytest.mark.parametrize("way", ["patch", "hook"])
def test_an_instrument_that_fails_is_called_once_and_named(observed, way):
    asked = []

    def fails(*_, **__):
        asked.append(1)
        raise ValueError("broken")

    net, _ = small()
    if way == "hook":
        before_forward(observed.context, net, "of the test", fails)
        look = functools.partial(net, torch.ones(2, 3))
    else:
        look = observed.context.safely("of the test", fails)
    for _ in range(3):
        look()
    assert len(asked) == 1
    assert observed.notes == ["no longer observed: of the test (ValueError: broken)"]
    # What is closed is not called at all.
    other = observed.context.safely("another", fails)
    observed.context.closed = True
    other()
    assert len(asked) == 1


def test_a_look_that_removes_itself_takes_no_other_with_it(observed):
    net, _ = small()
    seen = []

    def once(*_):
        seen.append("once")
        handle.remove()

    handle = before_forward(observed.context, net, "of the test", once)
    before_forward(observed.context, net, "another", lambda *_: seen.append("always"))
    for _ in range(2):
        net(torch.ones(2, 3))
    assert seen == ["once", "always", "always"]


# Gradients between updates.


@pytest.mark.parametrize(
    ("between", "kept"),
    [
        ("nothing", 5),
        ("zero_grad", 0),
        # Both write where autograd does not look. The first decay is taken for an addition: only
        # from then on are elements remembered.
        ("zero_data", 0),
        ("decay_data", 1),
    ],
)
def test_gradients_that_stay_are_told_from_those_that_somebody_writes(observed, between, kept):
    net, optimizer = small()
    for _ in range(6):
        net(torch.ones(2, 3)).square().sum().backward()
        observed.step(optimizer)
        if between == "zero_grad":
            optimizer.zero_grad()
        for parameter in net.parameters() if between.endswith("data") else ():
            parameter.grad.data.mul_(0.0 if between == "zero_data" else 0.9)
    states = [event.get("gradients of optimizer 0", []) for event in observed.events("update")]
    assert sum(state == ["kept"] for state in states) == kept, states


@pytest.mark.parametrize("second", ["another point", "the same point", "fully sharded"])
def test_gradients_of_a_first_pass_may_be_used_before_the_second(observed, second):
    net, optimizer = small()
    if second == "fully sharded":
        for parameter in net.parameters():
            parameter.device_mesh = None
    for _ in range(3):
        net(torch.ones(2, 3)).square().sum().backward()
        before = [p.detach().clone() for p in net.parameters()]
        for parameter in net.parameters() if second == "another point" else ():
            parameter.data.add_(parameter.grad, alpha=0.05)
        optimizer.zero_grad()
        net(torch.ones(2, 3)).square().sum().backward()
        for parameter, value in zip(net.parameters(), before, strict=True):
            parameter.data = value
        observed.step(optimizer)
        optimizer.zero_grad()
    states = [event.get("gradients of optimizer 0") for event in observed.events("update")]
    said = {"another point": "used", "the same point": "none", "fully sharded": "elsewhere"}
    assert [state[1] for state in states[1:]] == [said[second]] * 2
    # An update moves the weights as well, and is no use of the first pass.
    assert states[-1][0] in ("none", "elsewhere")


def no_op(*_):
    """A hook, which may have brought the gradients."""


@pytest.mark.parametrize(
    ("loop", "cleared"),
    [
        ("cleared", 5),
        ("usual", 0),
        ("skipped", 1),
        ("accumulates", 0),
        ("other parameters", 0),
        ("another optimizer", 0),
        ("by hand", 0),
        ("by hand, through data", 0),
        ("in a hook of the gradient", 0),
        ("hooked", 0),
        ("own class", 0),
    ],
)
def test_gradients_that_are_taken_away_before_the_update(observed, loop, cleared):
    class Own(torch.optim.SGD):
        """Might read gradients from elsewhere."""

    net, optimizer = small()
    other, again = nn.Linear(3, 2), torch.optim.SGD(net.parameters(), lr=0.1)
    if loop == "own class":
        optimizer = Own(net.parameters(), lr=0.1)
    elif loop == "hooked":
        optimizer.register_step_pre_hook(no_op)
    elif loop == "in a hook of the gradient":
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    usual = {"usual", "accumulates"}
    for step in range(6):
        trained = other if loop == "other parameters" else net
        trained(torch.ones(2, 3)).square().sum().backward()
        if loop == "accumulates":
            trained(torch.ones(2, 3)).square().sum().backward()
        if loop.startswith("by hand"):
            with torch.no_grad():
                for parameter in net.parameters():
                    written = parameter.data if loop.endswith("data") else parameter
                    written.sub_(parameter.grad, alpha=0.01)
        if loop == "another optimizer":
            observed.step(again)
        if loop not in usual and (loop != "skipped" or step in (2, 3)):
            optimizer.zero_grad()
        observed.step(optimizer)
        optimizer.zero_grad()
    found = [e for e in observed.events("update") if any(k.startswith("cleared") for k in e)]
    # That of the first update without a gradient is not known: until then nobody looks.
    assert len(found) == cleared


def test_a_closure_makes_its_gradients_inside_of_the_step(observed):
    net, optimizer = small()
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())

    def closure():
        loss = net(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(5):
        observed.step(optimizer, closure)
    for event in observed.events("update"):
        assert event["backwards"] == 1
        assert "cleared_before_step of optimizer 0" not in event


@pytest.mark.parametrize(
    ("way", "seen"),
    [
        ("zeros", True),
        ("before", False),
        ("one", False),
        ("by_hand", False),
        ("dead", False),
        ("dead and clipped", False),
    ],
)
def test_zeros_written_between_backward_and_the_update(observed, way, seen):
    net, optimizer = small()
    for _ in range(12):
        dead = way.startswith("dead")
        if dead or way == "before":
            optimizer.zero_grad(set_to_none=False)
        inputs = torch.zeros(2, 3) if dead else torch.ones(2, 3)
        (net(inputs).square().sum() * (0 if dead else 1)).backward()
        if way == "dead and clipped":
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if way == "one":
            net[0].weight.grad.zero_()
        if way == "by_hand":
            for parameter in net.parameters():
                parameter.data.sub_(0.01 * parameter.grad)
        if way in ("zeros", "by_hand"):
            optimizer.zero_grad(set_to_none=False)
        observed.step(optimizer)
    cleared = [
        event["update"]
        for event in observed.events("update")
        if event.get("cleared_before_step of optimizer 0")
    ]
    # What the first update was made from is not known.
    assert cleared == (list(range(1, 12)) if seen else [])


# Ownership and checkpoints.


def test_what_a_script_notes_in_a_parameter_group_is_no_setting():
    _, optimizer = small()
    optimizer.param_groups[0] |= {"local_loss": 0.25, "initial_lr": 0.1}
    stream = OptimizerStream(optimizer, {}, 0)
    assert stream.changed()
    names = {e.name for e in stream.layout().phases[GRADIENTS] if e.kind == "setting"}
    assert "param_groups[0]['momentum']" in names
    assert not any("local_loss" in name for name in names)
    # A note that changes is no other setting, and a rate that changes is.
    assert not stream.changed()
    lr = stream.before(0)
    optimizer.param_groups[0]["local_loss"] = 0.5
    stream.changed()
    assert stream.before(0) == lr
    optimizer.param_groups[0]["lr"] = 0.5
    stream.changed()
    assert stream.before(0) != lr
    # One that is written to stays the same object.
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.5)
    stream.changed()
    before = stream.before(0)
    rate.fill_(0.25)
    stream.changed()
    assert stream.before(0) != before


def test_a_replaced_layer_is_nobodys_and_the_old_one_stays_with_the_optimizer(observed):
    net, optimizer = small()
    net[2] = nn.Linear(4, 2)
    net(torch.ones(2, 3)).sum().backward()
    observed.step(optimizer)
    (event,) = observed.events("ownership")
    assert (event["stray"], event["orphans"], event["held"]) == (2, 2, 4)
    assert [name for name, _ in event["some_orphans"]] == ["2.weight", "2.bias"]


def test_parameters_of_another_optimizer_are_no_orphans(observed):
    net, _ = small()
    first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    second = torch.optim.SGD(net[2].parameters(), lr=0.1)
    net(torch.ones(2, 3)).sum().backward()
    observed.step(first)
    observed.step(second)
    assert observed.events("ownership") == []


def test_tensors_that_are_trained_by_themselves_are_counted(observed):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    prompts = [torch.zeros(3, requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.SGD(prompts, lr=0.1)
    net(torch.ones(2, 3) + prompts[0]).sum().backward()
    observed.step(optimizer)
    (event,) = observed.events("ownership")
    assert (event["stray"], event["free"], event["orphans"]) == (2, 1, 4)


@pytest.mark.parametrize("paired", [False, True])
def test_two_optimizers_at_work_on_one_model(observed, paired):
    (one, _), (other, _) = small(), small()
    pair = nn.ModuleList([one, other]) if paired else None
    assert pair is None or len(pair) == 2
    first, second = (torch.optim.SGD(one.parameters(), lr=0.1) for _ in range(2))
    for _ in range(2):
        one(torch.ones(2, 3)).sum().backward()
        observed.step(first)
        second.zero_grad()
        other(torch.ones(2, 3)).sum().backward()
        observed.step(second)
    event = observed.events("ownership")[-1]
    # Held by another optimizer, they are no leftovers of a model that was converted.
    assert (event["optimizer"], event["stray"], event["orphans"]) == (1, 0, 4)
    assert (event["all_held_by"], event["models_in_none"] > 0) == ([0], True)


def test_copies_and_views_of_what_an_optimizer_holds(observed):
    net, _ = small()
    masters = [p.detach().clone().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for _ in range(3):
        net(torch.ones(2, 3)).sum().backward()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            master.grad = parameter.grad.clone()
        observed.step(optimizer)
        with torch.no_grad():
            for master, parameter in zip(masters, net.parameters(), strict=True):
                parameter.copy_(master)
    assert [event["written"] for event in observed.events("ownership")] == [0, 4]
    flat = nn.Parameter(torch.zeros(26))
    for parameter, view in zip(net.parameters(), flat.detach().split([12, 4, 8, 2]), strict=True):
        parameter.data = view.view_as(parameter)
    flat.grad = torch.ones(26)
    before = len(observed.events("ownership"))
    observed.step(torch.optim.SGD([flat], lr=0.1))
    assert len(observed.events("ownership")) == before


def test_an_optimizer_of_the_same_parameters_is_made_anew(observed):
    net, optimizer = small()
    parameters = Parameters(observed.context, dict)
    held = [Held(name, p, replicated=True) for name, p in net.named_parameters()]
    other = [Held(name, p, replicated=True) for name, p in small()[0].named_parameters()]
    for number, own in enumerate((held, other, held[:2], held, held)):
        parameters.described(number, optimizer, 0, own)
    # A group is added to the third: it is the same optimizer as before.
    parameters.described(2, optimizer, 1, held)
    assert [e["after"] for e in observed.events("optimizer")] == [None, None, None, 0, 0, None]
    assert parameters.made_anew == 2


def test_weights_that_no_optimizer_holds_are_looked_at(observed):
    net, optimizer = small()
    # No module is registered when one is copied; it is known once it is frozen.
    teacher = copy.deepcopy(net).requires_grad_(False)
    for step in range(4):
        loss = (net(torch.ones(2, 3)) - teacher(torch.ones(2, 3)) - 1).square().sum()
        loss.backward()
        observed.step(optimizer)
        if step == 1:
            teacher.load_state_dict(net.state_dict())
    events = observed.events("copy")
    assert [(e["number"], e["update"], e["calls"]) for e in events] == [
        (0, 0, 0),
        (0, 1, 1),
        (0, 2, 2),
        (0, 3, 3),
    ]
    assert events[0]["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all("names" not in event for event in events[1:])
    first, second, third, fourth = (event["digests"] for event in events)
    assert first == second != third == fourth


def test_what_is_loaded_is_the_same_where_its_numbers_are(observed):
    net, optimizer = small()
    other, _ = small()
    loads = Loads(observed.context)
    try:
        net.load_state_dict(net.state_dict())
        other.load_state_dict(state_dict=net.state_dict())
        other.load_state_dict(small()[0].state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        loads.close()
    one, again, drawn, of_optimizer = [e["content"] for e in observed.events("load")]
    assert one == again != drawn
    assert None not in (one, drawn)
    assert of_optimizer is None


@pytest.mark.parametrize("tied", ["tied", "copied", "never"])
def test_a_tie_is_broken_where_the_values_are_equal_in_two_places(observed, tied):
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    if tied == "tied":
        net[1].weight = net[0].weight
    elif tied == "copied":
        net[1].weight = nn.Parameter(net[0].weight.detach().clone())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.arange(3)).sum().backward()
    observed.step(optimizer)
    ties = [event["broken_ties"] for event in observed.events("ownership")]
    assert ties == ([[["0", "1"]]] if tied == "copied" else [])


@pytest.mark.parametrize("mode", ["train", "eval", "not frozen"])
def test_statistics_that_move_are_seen_below_frozen_parameters_only(observed, mode):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[0].requires_grad_(mode == "not frozen")
    net[0].train(mode != "eval")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(4, 3)).sum().backward()
        observed.step(optimizer)
    moved = [event["moved"] for event in observed.events("frozen")]
    assert moved == ([["0"]] if mode == "train" else [])


def test_an_encoder_that_follows_another_one_is_not_frozen(observed):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(4, 3)).sum().backward()
        with torch.no_grad():
            net[0].weight.lerp_(torch.full((3,), 2.0), 0.1)
        observed.step(optimizer)
    assert observed.events("frozen") == []


@pytest.mark.parametrize(
    "way", ["resumed", "left out", "another rate", "empty state", "another head"]
)
def test_a_state_is_left_out_where_it_would_fit(observed, tmp_path, way):
    net, _ = small()
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    if way != "empty state":
        net(torch.ones(2, 3)).sum().backward()
        adam.step()
    torch.save({"model": net.state_dict(), "optimizers": [adam.state_dict()]}, tmp_path / "c.pt")
    content = torch.load(tmp_path / "c.pt")
    if way == "another head":
        del content["model"]["2.weight"]
    net.load_state_dict(content["model"], strict=way != "another head")
    again = torch.optim.Adam(net.parameters(), lr=0.001 if way == "another rate" else 0.01)
    if way == "resumed":
        again.load_state_dict(content["optimizers"][0])
    observed.step(again)
    assert len(observed.events("resumed")) == (way == "resumed")
    assert len(observed.events("not_resumed")) == (way == "left out")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("way", "seen"),
    [
        ("anew", 1),
        ("loaded", 0),
        ("told of its steps", 0),
        ("stepped on", 0),
        ("another length", 0),
        ("no optimizer state", 0),
        ("never stepped", 0),
    ],
)
def test_a_schedule_that_begins_anew_below_an_optimizer_that_goes_on(observed, tmp_path, way, seen):
    def made(length=9, **options):
        net, _ = small()
        adam = torch.optim.Adam(net.parameters(), lr=0.01)
        return net, adam, lambda: lr_scheduler.CosineAnnealingLR(adam, length, **options)

    net, adam, schedule = made()
    first = schedule()
    net(torch.ones(2, 3)).sum().backward()
    for _ in range(4 if way != "never stepped" else 0):
        adam.step()
        first.step()
    if way == "never stepped":
        adam.step()
    parts = {"model": net, "optimizer": adam, "schedule": first}
    torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "c.pt")
    content = torch.load(tmp_path / "c.pt")
    told = {"last_epoch": 4} if way == "told of its steps" else {}
    net, adam, schedule = made(length=7 if way == "another length" else 9, **told)
    net.load_state_dict(content["model"])
    if way == "told of its steps":
        adam.load_state_dict(content["optimizer"])
    second = schedule()
    if way not in ("no optimizer state", "told of its steps"):
        adam.load_state_dict(content["optimizer"])
    if way == "loaded":
        second.load_state_dict(content["schedule"])
    for _ in range(4 if way == "stepped on" else 0):
        second.step()
    observed.step(adam)
    events = observed.events("schedule_not_resumed")
    assert [(event["class"], event["steps"]) for event in events] == [
        ("CosineAnnealingLR", 4)
    ] * seen


def test_weights_that_the_script_reduces_are_told_from_gradients(observed):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    by_hand = ByHand(observed.context)
    net, _ = small()
    net(torch.ones(2, 3)).sum().backward()
    held = list(net.named_parameters())
    try:
        for update in range(4):
            dist.all_reduce(net[0].weight.grad)
            if update == 2:
                dist.all_reduce(net[2].bias.data)
            by_hand.before_update(0, update, held)
        # An update without, and another one; the first after it is as before.
        by_hand.before_update(0, 4, held)
        by_hand.before_update(0, 5, held)
        dist.all_reduce(net[0].weight.grad)
        by_hand.before_update(0, 6, held)
    finally:
        by_hand.close()
        dist.destroy_process_group()
    (weights,) = observed.events("weights_reduced")
    assert (weights["update"], weights["names"], weights["count"]) == (2, ["2.bias"], 1)
    assert observed.events("reduced_as_one") == []
    reduced = [(e["update"], e["names"]) for e in observed.events("reduced_by_hand")]
    assert reduced == [(0, ["0.weight"]), (4, []), (6, ["0.weight"])]


def test_averages_of_all_weights_in_one_tensor_are_seen_each_time(observed):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    by_hand = ByHand(observed.context)
    net, _ = small()
    held = list(net.named_parameters())
    try:
        for update in range(6):
            if update % 2:
                flat = nn.utils.parameters_to_vector(net.parameters()).detach()
                dist.all_reduce(flat[1:] if update == 5 else flat)
            by_hand.before_update(0, update, held)
    finally:
        by_hand.close()
        dist.destroy_process_group()
    events = observed.events("reduced_as_one")
    assert [(e["update"], e["count"]) for e in events] == [(1, 4), (3, 4)]
    assert events[0]["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_small_reductions_are_seen_with_what_went_in_and_what_came_out(observed):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.tensor([3.0, 4.0]))
        dist.all_reduce(torch.zeros(1000))
        dist.all_gather([torch.zeros(2)], torch.ones(2))
    finally:
        dist.destroy_process_group()
    (event,) = observed.events("reduced")
    assert (event["mine"], event["all"]) == ([3.0, 4.0], [3.0, 4.0])
    assert event["at"].startswith(__file__)
    assert len(observed.events("gathered")) == 1


# All of them.


def patched():
    places = (
        (torch, "load"),
        (torch, "set_rng_state"),
        (torch.autograd, "backward"),
        (dist, "all_reduce"),
        (nn.utils, "clip_grad_norm_"),
        (nn.Module, "load_state_dict"),
        (torch.optim.Optimizer, "__init__"),
        (torch.optim.Optimizer, "load_state_dict"),
        (torch.amp.GradScaler, "scale"),
        (lr_scheduler.LRScheduler, "step"),
    )
    return [vars(owner)[name] for owner, name in places]


def test_everything_is_put_back(tmp_path):
    before = patched()
    made = Observed(tmp_path / "journal.jsonl")
    assert all(now is not was for now, was in zip(patched(), before, strict=True))
    made.close()
    assert patched() == before


def test_more_optimizers_than_can_be_followed_do_not_end_the_watch(tmp_path):
    watcher = Watcher(folder=str(tmp_path))
    try:
        # As with one for each parameter, which is stepped inside of backward.
        kept = []
        for _ in range(MOST_OPTIMIZERS + 6):
            _, optimizer = small()
            kept.append(optimizer)
            optimizer.step()
        kept[0].step()
    finally:
        watcher.close()
    assert watcher.failed is None
    updates = [one["updates"] for one in watcher.updates.summary()]
    assert updates == [2] + [1] * (MOST_OPTIMIZERS - 1)
    assert watcher.notes == [
        f"only the first {MOST_OPTIMIZERS} optimizers of the script were followed"
    ]


def test_training_is_the_same_with_and_without(tmp_path):
    def result(observe):
        torch.manual_seed(5)
        made = Observed(tmp_path / "journal.jsonl") if observe else None
        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 9)
        losses = []
        for x, y in itertools.chain.from_iterable(
            DataLoader(labelled(24), 4, shuffle=True) for _ in range(2)
        ):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            made.step(optimizer) if made else optimizer.step()
            schedule.step()
            losses.append(loss.item())
        if made:
            made.close()
            assert made.notes == []
        return losses, [t.tolist() for t in net.state_dict().values()], torch.rand(2).tolist()

    assert result(observe=True) == result(observe=False)


# Functions of torch that are replaced.


class Library:
    def step(self):
        warnings.warn("two levels up is the program", stacklevel=2)
        return sys._getframe(1)


def test_a_warning_names_the_line_of_the_program_and_a_traceback_is_still_the_watchers():
    patches = Patches()
    patches.around(Library, "step", before=lambda *_: None)
    try:
        with pytest.warns(UserWarning, match="two levels") as caught:
            frame = Library().step()
        around = frame.f_code
        with warnings.catch_warnings(record=True) as once:
            warnings.simplefilter("default")
            for _ in range(2):
                Library().step()
    finally:
        patches.close()
    assert caught[0].filename == __file__
    assert around.co_filename.startswith(str(ROOT / "harness" / "watch"))
    assert len(once) == 1, "it is said once for each line of the program, as it would be"
    assert Library.step.__name__ == "step"
    assert inspect.getsource(Library.step).lstrip().startswith("def step")


# Random numbers drawn while samples are read.


class Drawing(torch.utils.data.Dataset):
    """Draws in one of several ways, none of them by the index."""

    def __init__(self, way):
        self.way = way

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.way in ("torch", "all"):
            torch.rand(())
        if self.way in ("python", "all"):
            random.random()
        if self.way in ("numpy", "all"):
            numpy.random.rand()
        if self.way == "own":
            torch.rand((), generator=torch.Generator().manual_seed(index))
        if self.way == "fails" and index == 3:
            raise ValueError(index)
        return index


def collate_that_draws(samples):
    torch.rand(3)
    return samples


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", ["torch", "python", "numpy", "all", "own", "none"])
def test_draws_are_those_of_the_samples_of_the_first_batch(observed, workers, way):
    loader = DataLoader(Drawing(way), 3, collate_fn=collate_that_draws, num_workers=workers)
    torch.manual_seed(0)
    random.seed(0)
    for _ in range(2):
        assert list(itertools.chain(*loader)) == list(range(12))
    events = observed.events("draws")
    # Workers come by when they do.
    places = sorted((e["number"], -1 if e["worker"] is None else e["worker"]) for e in events)
    assert places == [(n, w) for n in (1, 2) for w in ([-1] if workers == 0 else [0, 1])]
    moved = {"all": {"torch", "python", "numpy"}, "own": set(), "none": set()}.get(way, {way})
    for event in events:
        assert event["class"] == "Drawing"
        assert event["workers"] == workers
        first = 3 * (event["worker"] or 0)
        assert event["indices"] == list(range(first, first + 3))
        before, after = event["before"], event["after"]
        assert {name for name in before if before[name] != after[name]} == moved


def test_draws_end_where_they_would_without_a_look(observed):
    def numbers():
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        list(DataLoader(Drawing("all"), 3, collate_fn=collate_that_draws))
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    watched = numbers()
    assert observed.events("draws")
    observed.close()
    assert numbers() == watched


@pytest.mark.parametrize("kind", ["evaluation", "stream", "later"])
def test_draws_that_are_none_of_training_or_have_no_indices_are_not_looked_at(observed, kind):
    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.rand(())

    if kind == "later":
        for _ in range(PASSES):
            list(DataLoader(Drawing("torch"), 6))
    with torch.set_grad_enabled(kind != "evaluation"):
        list(DataLoader(Stream() if kind == "stream" else Drawing("torch"), 6))
    assert len(observed.events("draws")) == (PASSES if kind == "later" else 0)


def test_a_sample_that_cannot_be_read_fails_as_it_would_and_is_no_look(observed):
    loader = DataLoader(Drawing("fails"), 4)
    with pytest.raises(ValueError, match="3"):
        list(loader)
    assert observed.events("draws") == []
    assert list(itertools.chain(*DataLoader(Drawing("torch"), 4))) == list(range(12))
    (event,) = observed.events("draws")
    assert event["number"] == 2


def test_the_state_of_pythons_generator_is_the_same_number_in_every_process():
    script = (
        "import random; random.seed(3)\n"
        "from harness.watch.instruments.random_state import random_state\n"
        "print(random_state()['python'])"
    )
    command = [sys.executable, "-c", script]
    random.seed(3)
    for _ in range(2):
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert int(ended.stdout) == random_state()["python"]


# Who writes to the state of an optimizer.


def written_state(observed, between):
    """Return the names of parameters whose state was written, by update."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(net.parameters())
    held = [Held(name, parameter, replicated=True) for name, parameter in net.named_parameters()]
    parameters = Parameters(observed.context, dict)
    found = []
    for update in range(4):
        net(torch.randn(5, 3)).sum().backward()
        if update == 0:
            parameters.described(0, optimizer, update, held)
        parameters.before_update(0, optimizer, update, parameters.alive(0))
        optimizer.step()
        parameters.after_update(0, optimizer, update)
        found.append((observed.context.window.take(0, update) or {}).get("state_written", []))
        optimizer = between(update, net, optimizer) or optimizer
    return found


def nothing(update, net, optimizer):
    optimizer.zero_grad()
    optimizer.state[net[0].bias].get("exp_avg").clone()


def scaled(update, net, optimizer):
    if update == 1:
        optimizer.state[net[1].bias]["exp_avg"].mul_(0.5)


def cleared(update, net, optimizer):
    if update == 1:
        optimizer.state.clear()


def loaded(update, net, optimizer):
    if update == 1:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def of_one_replaced(update, net, optimizer):
    if update == 1:
        state = optimizer.state[net[0].weight]
        state["exp_avg_sq"] = state["exp_avg_sq"].clone()


ALL_FOUR = ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("between", "names"),
    [
        (nothing, []),
        (scaled, ["1.bias"]),
        (cleared, ALL_FOUR),
        (loaded, ALL_FOUR),
        (of_one_replaced, ["0.weight"]),
    ],
)
def test_state_that_somebody_else_writes_is_noticed(observed, between, names):
    assert written_state(observed, between) == [[], [], names, []]


def test_state_that_does_not_count_its_writes_is_left_alone(observed):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    held = [Held("weight", net.weight, replicated=True)]
    parameters = Parameters(observed.context, dict)
    parameters.described(0, optimizer, 0, held)
    with torch.inference_mode():
        optimizer.state[net.weight]["momentum_buffer"] = torch.zeros(2, 3)
    parameters.after_update(0, optimizer, 0)
    parameters.before_update(0, optimizer, 1, parameters.alive(0))
    assert "state_written" not in (observed.context.window.take(0, 1) or {})
