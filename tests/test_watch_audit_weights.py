"""How much each row of a loss weighs: read from graphs, and lined up over ranks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.watch.__main__ import parse
from harness.watch.audit.comparison import compare, floors
from harness.watch.audit.contribution import _telling
from harness.watch.audit.forward_pass import mark
from harness.watch.audit.loss_graph import loss_graph
from harness.watch.audit.trees import CannotModel, changed, kept, tensors
from harness.watch.audit.weighting import Loss, corrections, losses

TARGET = torch.tensor([-100, 1, 2, 3, 4, 0])
MASK = torch.tensor([1.0, 0, 1, 1, 0, 1])
CLASS_WEIGHTS = torch.arange(1.0, 6.0)


def teacher(rows):
    return torch.softmax(torch.arange(5.0), 0).expand(rows, 5)


def focal(output):
    each = F.cross_entropy(output, TARGET.clamp(min=0), reduction="none")
    return ((1 - torch.exp(-each)).square() * each).mean()


LOSSES = {
    # name: loss, how many rows count, weight of each of them
    "mean": (lambda o: F.cross_entropy(o, TARGET), [(5, 1 / 5)]),
    "times_three": (lambda o: 3 * F.cross_entropy(o, TARGET), [(5, 3 / 5)]),
    "sum": (lambda o: F.cross_entropy(o, TARGET, reduction="sum") / 8, [(5, 1 / 8)]),
    "mask": (
        lambda o: (F.cross_entropy(o, TARGET, reduction="none") * MASK).sum() / MASK.sum(),
        # The row that is ignored is in the mask: it has a gradient of zero as a loss all the same.
        [(4, 1 / 4)],
    ),
    "class_weights": (
        lambda o: F.cross_entropy(o, TARGET, weight=CLASS_WEIGHTS),
        [(1 + 2 + 3 + 4 + 5, 1 / 15)],
    ),
    "class_weights_sum": (
        lambda o: F.cross_entropy(o, TARGET, weight=CLASS_WEIGHTS, reduction="sum"),
        [(15, 1)],
    ),
    "pixels": (lambda o: F.cross_entropy(o.expand(2, 6, 5).mT, TARGET.expand(2, 6)), [(10, 0.1)]),
    "squared": (lambda o: F.mse_loss(o, torch.zeros(6, 5)), [(30, 1 / 30)]),
    "absolute": (lambda o: F.l1_loss(o, torch.zeros(6, 5)), [(30, 1 / 30)]),
    "huber": (lambda o: F.huber_loss(o, torch.zeros(6, 5), reduction="sum"), [(30, 1)]),
    "logits": (lambda o: F.binary_cross_entropy_with_logits(o, torch.ones(6, 5)), [(30, 1 / 30)]),
    "kl": (lambda o: F.kl_div(o.log_softmax(1), teacher(6), reduction="batchmean"), [(30, 1 / 6)]),
    "by_hand": (lambda o: (o - 1).square().mean(), [(30, 1 / 30)]),
    "by_hand_masked": (lambda o: (o.square().mean(1) * MASK).sum() / MASK.sum(), [(4, 1 / 4)]),
    "chosen": (lambda o: o.square().mean(1)[MASK.bool()].sum() / MASK.sum(), [(4, 1 / 4)]),
    "two": (
        lambda o: F.cross_entropy(o, TARGET) + 0.5 * F.mse_loss(o, torch.zeros(6, 5)),
        [(5, 1 / 5), (30, 0.5 / 30)],
    ),
    "list": (
        lambda o: torch.stack([F.cross_entropy(o[:3], TARGET[:3]), o[3:].square().mean()]).mean(),
        [(2, 1 / 4), (15, 1 / 30)],
    ),
    "weighted_rows": (focal, [(6, 1 / 6)]),
}


def read(loss_of, *, scalar=False):
    torch.manual_seed(0)
    net = nn.Linear(4, 5)
    output = net(torch.randn(6, 4))
    loss = loss_of(output)
    node = loss if scalar else output
    mark(node.grad_fn, node)
    root = loss / 2 if scalar else loss
    graph = loss_graph([root], {id(p) for p in net.parameters()})
    root.backward()
    return graph, net


@pytest.mark.parametrize("name", LOSSES)
def test_the_graph_tells_how_many_rows_count_and_what_each_weighs(name):
    loss_of, due = LOSSES[name]
    graph, _ = read(loss_of)
    assert graph.complete
    assert not graph.past
    read_off = [one.weight() for one in _telling(graph.reductions)]
    assert [(count, pytest.approx(abs(weight), rel=1e-5)) for weight, count, _ in read_off] == due
    assert all(alike for _, _, alike in read_off)


def test_a_loss_inside_of_the_model_is_read_too():
    graph, _ = read(lambda o: F.cross_entropy(o, TARGET), scalar=True)
    assert [one.weight()[:2] for one in graph.reductions] == [(pytest.approx(1 / 10), 5)]


def test_parameters_past_the_outputs_are_seen():
    torch.manual_seed(0)
    net = nn.Linear(4, 5)
    output = net(torch.randn(6, 4))
    mark(output.grad_fn, output)
    parameters = {id(p) for p in net.parameters()}
    assert loss_graph([output.sum() + net.weight.square().sum()], parameters).past
    assert not loss_graph([output.sum()], parameters).past


def test_listening_changes_no_gradient():
    loss_of, _ = LOSSES["two"]
    _, listened = read(loss_of)
    torch.manual_seed(0)
    net = nn.Linear(4, 5)
    loss_of(net(torch.randn(6, 4))).backward()
    assert torch.equal(listened.weight.grad, net.weight.grad)


def one(count, weight, at="train.py:9", **about):
    found = {"kind": "NllLoss", "how": "mean", "alike": True, "tolerance": 1e-5} | about
    return {"at": at, "losses": [found | {"count": count, "weight": weight}]}


@pytest.mark.parametrize(
    ("cells", "weighting"),
    [
        ({(0, 0): (6, 0.1), (1, 0): (14, 0.1)}, "equal"),
        ({(0, 0): (6, 1 / 6), (1, 0): (14, 1 / 14)}, "ranks"),
        ({(0, 0): (6, 1 / 6), (0, 1): (3, 1 / 3), (1, 0): (6, 1 / 6), (1, 1): (3, 1 / 3)}, "micro"),
        # Each rank divides by the rows of its own window.
        ({(0, 0): (6, 1 / 9), (0, 1): (3, 1 / 9), (1, 0): (2, 1 / 4), (1, 1): (2, 1 / 4)}, "ranks"),
        # Counts are added up over ranks, and not over the window.
        ({(0, 0): (6, 1 / 8), (0, 1): (3, 1 / 5), (1, 0): (2, 1 / 8), (1, 1): (2, 1 / 5)}, "micro"),
        ({(0, 0): (6, 0.1), (1, 0): (6, 0.2)}, "other"),
        ({(0, 0): (0, 0.0), (1, 0): (6, 0.2)}, "equal"),
    ],
)
def test_weights_are_explained_by_counts(cells, weighting):
    (found,), unknown = losses({cell: one(*about) for cell, about in cells.items()})
    assert unknown is None
    assert found.weighting.startswith(weighting)
    factors = corrections([found])
    even = [found.weights[c] * factors[c] for c, count in found.counts.items() if count]
    assert max(even) == pytest.approx(min(even))
    total = sum(w * found.counts[c] for c, w in found.weights.items())
    assert sum(even[0] * n for n in found.counts.values()) == pytest.approx(total)


def test_backward_passes_from_two_lines_are_two_losses():
    cells = {(rank, n): one(6, 1 / 6, at=f"gan.py:{n}") for rank in (0, 1) for n in (0, 1)}
    found, _ = losses(cells)
    assert [sorted(loss.counts) for loss in found] == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def test_losses_that_cannot_be_lined_up_say_why():
    assert losses({(0, 0): one(6, 1), (1, 0): one(6, 1, kind="MseLoss")})[1] == (
        "the ranks or micro-batches have different losses"
    )
    assert "of its own" in losses({(0, 0): one(6, 1, alike=False)})[1]
    assert "counted" in losses({})[1]


def test_losses_of_one_pass_that_need_different_factors_have_none():
    about = {"kind": "NllLoss", "how": "mean", "tolerance": 1e-5}
    labels = Loss(counts={(0, 0): 6, (1, 0): 3}, weights={(0, 0): 1 / 6, (1, 0): 1 / 3}, **about)
    rows = Loss(counts={(0, 0): 4, (1, 0): 4}, weights={(0, 0): 1 / 4, (1, 0): 1 / 4}, **about)
    assert corrections([labels, rows]) is None
    assert corrections([rows]) == {(0, 0): 1.0, (1, 0): 1.0}


def test_a_tensor_that_is_rounding_only_has_no_say():
    due = {(0, "weight"): torch.tensor([1.0, 2.0]), (0, "bias"): torch.tensor([1e-9])}
    moved = {(0, "weight"): torch.tensor([1.0, 2.000001]), (0, "bias"): torch.tensor([-2e-9])}
    floor = floors(due, [moved])
    given = {(0, "weight"): torch.tensor([3.0, 6.0]), (0, "bias"): torch.tensor([7e-9])}
    compared = compare(given, due, floor, 0.0)
    assert compared.factor == 3.0
    assert compared.clean
    assert [one.name[1] for one in compared.tensors if one.is_noise] == ["bias"]


@pytest.mark.parametrize("given", [None, torch.zeros(2)])
def test_a_gradient_that_is_missing_is_a_fault(given):
    name = (0, "weight")
    due = {name: torch.ones(2), (0, "other"): torch.ones(3)}
    floor = floors(due, [{key: value * 1.0000001 for key, value in due.items()}])
    compared = compare({name: given, (0, "other"): torch.ones(3)}, due, floor, 0.0)
    assert compared.fault
    assert compared.worst(1)[0].name == name


def test_arguments_are_kept_as_they_are():
    x = torch.ones(2, requires_grad=True)
    copied = changed({"x": [x, (1, None)], "n": 3}, kept)
    with torch.no_grad():
        x += 1
    assert copied["x"][0].tolist() == [1.0, 1.0]
    assert copied["x"][0].requires_grad
    assert [t.shape for t in tensors(copied)] == [(2,)]
    with pytest.raises(CannotModel, match="called with a object"):
        changed([object()], kept)


def test_an_audited_module_can_be_copied_and_pickled():
    from harness.watch.audit.recorder import Recorder
    from harness.watch.instruments.context import Context
    from harness.watch.journal import Journal

    context = Context(Journal(), None, lambda text: None)
    recorder = Recorder(context)
    try:
        net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        recorder.add(net, averaged=True)
        recorder.arm(True)
        net(torch.ones(1, 2)).sum().backward()
        assert len(recorder.passes) == 1
        assert recorder.passes[0].gradients
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            other(torch.ones(1, 2)).sum().backward()
        assert len(recorder.passes) == 1, "a copy is none of ours"
        recorder.arm(False)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    finally:
        recorder.close()


@pytest.mark.parametrize("typed", ["every=50", "50"])
def test_how_often_is_typed(typed):
    assert parse(["--audit", typed, "train.py"]).audit_every == 50


@pytest.mark.parametrize("typed", ["every=0", "every", "often=3", "-1", "every=1.5"])
def test_what_is_not_a_number_of_updates_is_refused(typed, capsys):
    with pytest.raises(SystemExit):
        parse([f"--audit={typed}", "train.py"])
    assert "every=50" in capsys.readouterr().err


def test_a_module_that_the_program_drops_is_let_go():
    import gc
    import weakref

    from harness.watch.audit.recorder import Recorder
    from harness.watch.instruments.context import Context
    from harness.watch.journal import Journal

    recorder = Recorder(Context(Journal(), None, lambda text: None))
    try:
        recorder.arm(True)
        net = nn.Linear(2, 3)
        recorder.add(net, averaged=True)
        net(torch.ones(1, 2)).sum().backward()
        gone = weakref.ref(net)
        del net
        gc.collect()
        assert gone() is None
        other = nn.Linear(2, 3)
        recorder.add(other, averaged=True)
        other(torch.ones(1, 2)).sum().backward()
        assert [one.holder for one in recorder.passes] == [0, 1]
    finally:
        recorder.close()
