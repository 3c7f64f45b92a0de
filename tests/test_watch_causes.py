"""The rules of the causes whose symptom is that replicas differ, on evidence made by hand."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from dataclasses import replace

import pytest

import harness.causes
from harness.causes import Strength, catalogue, diagnose
from harness.causes.by_hand import averages_by_hand
from harness.watch.divergence import Difference, Divergence
from harness.watch.evidence import Evidence

RANKS = (0, 1, 2)
EACH = ((0,), (1,), (2,))
ONE_ODD = ((0, 2), (1,))
NAMES = ("body.weight", "head.weight")


def parted(
    phase="gradients", kind="gradient", names=NAMES, groups=EACH, step=0, compared=2, values=None
):
    found = tuple(
        Difference(name=name, kind=kind, groups=groups, values=values or {}) for name in names
    )
    return Divergence(step=step, phase=phase, differences=found, compared=compared, ranks=RANKS)


def update(number=0, optimizer=0, step=None, **fields):
    step = number if step is None else step
    return {"kind": "update", "optimizer": optimizer, "update": number, "step": step, **fields}


def passes(
    forwards=1, without_sync=0, past=0, backwards=1, synchronised=True, module=0, number=0, **more
):
    """A window as the forward and backward instruments write it for one wrapper."""
    counts = {
        "forwards": forwards,
        "forwards_without_sync": without_sync,
        "forwards_past_wrapper": past,
    }
    fields = {f"{name} of module {module}": count for name, count in counts.items() if count}
    fields |= {name: count for name, count in counts.items() if count}
    if forwards:
        fields[f"last_forward_synchronised of module {module}"] = synchronised
    return update(number, backwards=backwards, **fields, **more)


def wrap(module=0, names=NAMES, ranks=RANKS, digests=(1, 2), shape=(2,), frozen=(), buffers=()):
    return {
        "kind": "wrap",
        "step": 0,
        "module": module,
        "ranks": list(ranks),
        "class": "Net",
        "at": "train.py:10",
        "parameters": [[name, list(shape), "float32", name not in frozen] for name in names],
        "buffers": [[name, [2], "float32"] for name in buffers],
        "digests": list(digests),
    }


def wrapper(module=0, step=0, **told):
    usual = {
        "sync_buffers": True,
        "find_unused_parameters": False,
        "static_graph": False,
        "hooks": [],
        "ignored": [],
        "digests": [1, 2],
    }
    return {"kind": "wrapper", "step": step, "module": module, **(usual | told)}


def holds(*, was="synchronised", module=0, names=NAMES, special=(), update=0):
    """The event of what an optimizer holds; `special` ones are what `was` says."""
    return {
        "kind": "optimizer",
        "step": 0,
        "optimizer": 0,
        "update": update,
        "class": "SGD",
        "parameters": [
            [name, module, (was if not special or name in special else "synchronised"), True]
            if module is not None
            else [name, None, "", True]
            for name in names
        ],
    }


def evidence(events, divergence=None, source="optimizer 0 (SGD)", ranks=RANKS, **more):
    """Evidence of ranks that did the same, or of what `events(rank)` says of each."""
    by_rank = {rank: tuple(events(rank) if callable(events) else events) for rank in ranks}
    return Evidence(
        world_size=len(ranks),
        ranks=tuple(ranks),
        journals=by_rank,
        divergence=divergence,
        source=source if divergence else "",
        **more,
    )


def found(given):
    """Names of what is more than a fact."""
    for one in diagnose(given):
        assert "rule itself failed" not in one.because[0], one
    return {one.cause for one in diagnose(given) if one.strength > Strength.FACT}


def proven(given):
    return {one.cause for one in diagnose(given) if one.strength == Strength.PROVEN}


SYNCHRONISED = (wrap(), wrapper(), holds())
"""A wrapper with its hooks where they belong."""


def only(given, name):
    """Whether that cause, and no other, is more than a fact."""
    return found(given) == {name}


# Gradients below a wrapper.


def test_a_backward_pass_without_a_forward_pass_of_the_wrapper_is_a_bypass():
    past = evidence([*SYNCHRONISED, passes(forwards=0, past=1)], parted())
    assert only(past, "ddp_forward_bypassed")
    assert proven(past)


def test_a_bypass_through_a_part_of_the_module_is_one_as_well():
    # `model.module.encoder(x)`: no hook sees it, and the wrapper was not called either.
    assert only(evidence([*SYNCHRONISED, passes(forwards=0)], parted()), "ddp_forward_bypassed")


def test_a_bypass_of_some_micro_batches_needs_more_backward_than_forward_passes():
    some = evidence([*SYNCHRONISED, passes(forwards=1, past=1, backwards=2)], parted())
    assert "ddp_forward_bypassed" in proven(some)
    # A penalty through the inner module, in the same backward pass, is reduced with the rest.
    penalty = evidence([*SYNCHRONISED, passes(forwards=1, past=1, backwards=1)], parted())
    assert "ddp_forward_bypassed" not in found(penalty)


def test_with_two_models_a_partial_bypass_is_likely_only():
    events = [*SYNCHRONISED, wrap(1), passes(forwards=1, past=1, backwards=2)]
    assert "ddp_forward_bypassed" in found(evidence(events, parted()))
    assert "ddp_forward_bypassed" not in proven(evidence(events, parted()))


def test_forward_passes_of_another_wrapper_do_not_hide_a_bypass():
    events = [*SYNCHRONISED, wrap(1), passes(forwards=2, past=0, module=1, backwards=2)]
    assert "ddp_forward_bypassed" in proven(evidence(events, parted()))


def test_a_bypass_on_one_rank_names_the_rank():
    def events(rank):
        return [*SYNCHRONISED, passes(forwards=0, past=1) if rank == 1 else passes()]

    (one,) = [
        one
        for one in diagnose(evidence(events, parted(groups=ONE_ODD)))
        if one.cause == "ddp_forward_bypassed"
    ]
    assert one.ranks == (1,)


@pytest.mark.parametrize(("of", "without"), [(1, 1), (3, 3), (3, 1)])
def test_a_last_forward_pass_without_synchronisation_is_the_wrong_half(of, without):
    window = passes(forwards=of, without_sync=without, backwards=of, synchronised=False)
    assert only(evidence([*SYNCHRONISED, window], parted()), "no_sync_wrong_half")


def test_accumulation_as_it_should_be_is_not_the_wrong_half():
    window = passes(forwards=3, without_sync=2, backwards=3)
    assert "no_sync_wrong_half" not in found(evidence([*SYNCHRONISED, window], parted()))


def test_no_sync_around_backward_alone_is_seen_without_a_divergence():
    vain = passes(forwards=3, backwards=3, **{"backwards_without_sync of module 0": 2})
    assert only(evidence([*SYNCHRONISED, vain]), "no_sync_wrong_half")
    right = passes(
        forwards=3, without_sync=2, backwards=3, **{"backwards_without_sync of module 0": 2}
    )
    assert found(evidence([*SYNCHRONISED, right])) == set()
    # The other model's backward pass, while this one is told not to synchronise and is not called.
    other = passes(forwards=1, module=1, backwards=1, **{"backwards_without_sync of module 0": 1})
    assert found(evidence([*SYNCHRONISED, wrap(1), other])) == set()


def test_a_parameter_that_was_not_there_when_wrapped_is_replaced():
    events = [wrap(), wrapper(find_unused_parameters=True)]
    events += [holds(was="absent", special=("head.weight",)), passes()]
    given = evidence(events, parted(names=("head.weight",)))
    assert only(given, "params_replaced")
    # The new head is trained on some other update; what parts here is the body.
    other = evidence(events, parted(names=("body.weight",)))
    assert "params_replaced" not in found(other)


def test_a_parameter_that_was_frozen_when_wrapped_is_unfrozen():
    events = [wrap(frozen=("body.weight",)), wrapper()]
    events += [holds(was="frozen", special=("body.weight",)), passes(number=3)]
    assert only(evidence(events, parted(names=("body.weight",), step=3)), "unfrozen_after_wrap")


def test_what_an_optimizer_holds_is_what_was_written_last_before_the_update():
    events = [wrap(frozen=("body.weight",)), wrapper(), holds(was="frozen"), wrap(1), wrapper(1)]
    events += [holds(module=1, update=3), passes(forwards=0, number=4, module=1)]
    assert only(evidence(events, parted(step=4)), "ddp_forward_bypassed")


def test_parameters_that_ddp_was_told_to_ignore():
    events = [wrap(), wrapper(ignored=["head.weight"])]
    events += [holds(was="ignored", special=("head.weight",)), passes()]
    assert only(evidence(events, parted(names=("head.weight",))), "params_ignored")
    assert "params_ignored" not in found(evidence(events, parted()))


def conversion(step=0, module=0):
    return {
        "kind": "conversion",
        "step": step,
        "module": module,
        "parameters": list(NAMES),
        "before": "float32 on cpu",
        "after": "float64 on cpu",
        "at": "train.py:12",
    }


def test_a_conversion_since_the_last_update_takes_the_hooks_away():
    events = [*SYNCHRONISED, conversion(), passes()]
    assert only(evidence(events, parted()), "hooks_lost")


def test_a_conversion_before_updates_that_were_right_is_another_matter():
    events = [*SYNCHRONISED, conversion(), passes(), passes(number=1), passes(number=2)]
    assert "hooks_lost" not in found(evidence(events, parted(step=2)))


def test_a_conversion_of_another_model_is_another_matter():
    events = [*SYNCHRONISED, conversion(module=1), passes()]
    assert "hooks_lost" not in found(evidence(events, parted()))


def gradients(frozen=(), without=()):
    return {
        "kind": "parameters",
        "step": 0,
        "optimizer": 0,
        "update": 0,
        "frozen": list(frozen),
        "without_gradient": list(without),
    }


def test_a_parameter_without_a_gradient_keeps_back_its_bucket():
    events = [*SYNCHRONISED, gradients(without=["body.weight"]), passes()]
    assert only(evidence(events, parted(names=("head.weight",))), "unused_parameters")


def test_a_parameter_that_is_frozen_after_wrapping_keeps_back_its_bucket_as_well():
    events = [*SYNCHRONISED, gradients(frozen=["body.weight"]), passes()]
    assert only(evidence(events, parted(names=("head.weight",))), "unused_parameters")


@pytest.mark.parametrize(
    ("inside", "static", "cause"),
    [(2, False, {"ready_twice"}), (0, False, set()), (2, True, set())],
)
def test_gradients_that_part_behind_reentrant_checkpoints(inside, static, cause):
    window = passes(backwards=1 + inside, **{"backwards_inside_backward": inside} if inside else {})
    events = [wrap(), wrapper(static_graph=static), holds(), window]
    assert found(evidence(events, parted())) - {"gradient_changed_on_one_rank"} == cause
    if cause:
        assert "gradient_changed_on_one_rank" not in found(evidence(events, parted(groups=ONE_ODD)))


@pytest.mark.parametrize(
    ("names", "none_on", "seen"),
    [
        (NAMES[1:], {1, 2}, True),
        (NAMES[1:], set(), False),
        (NAMES[1:], {0, 1, 2}, False),
        (NAMES, {1, 2}, False),
    ],
)
def test_a_gradient_that_only_some_ranks_have(names, none_on, seen):
    def events(rank):
        without = list(NAMES[1:]) if rank in none_on else []
        parameters = {"kind": "parameters", "optimizer": 0, "update": 0, "frozen": []}
        told = wrapper(find_unused_parameters=True)
        return [wrap(), told, holds(), parameters | {"without_gradient": without}, passes()]

    given = evidence(events, parted(names=names, groups=((0,), (1, 2))))
    assert ("grad_none_on_one_rank" in proven(given)) is seen


@pytest.mark.parametrize("flag", ["find_unused_parameters", "static_graph"])
def test_ddp_copes_with_unused_parameters_when_told(flag):
    events = [wrap(), wrapper(**{flag: True}), holds()]
    events += [gradients(without=["body.weight"]), passes()]
    assert "unused_parameters" not in found(evidence(events, parted()))


def test_a_parameter_that_was_frozen_all_along_is_not_waited_for():
    events = [wrap(frozen=("body.weight",)), wrapper()]
    events += [holds(was="frozen", special=("body.weight",))]
    events += [gradients(frozen=["body.weight"]), passes()]
    assert "unused_parameters" not in found(evidence(events, parted(names=("head.weight",))))


def test_other_numbers_of_passes_on_one_rank():
    def events(rank):
        return [
            *SYNCHRONISED,
            passes(),
            passes(2, backwards=2, number=1) if rank == 1 else passes(number=1),
        ]

    given = evidence(events, parted(groups=ONE_ODD, step=1))
    assert only(given, "update_skipped_on_one_rank")
    assert next(iter(diagnose(given))).ranks == (1,)


def test_an_update_that_the_scaler_of_one_rank_skipped_is_the_scalers():
    def events(rank, halved_at=1):
        odd = [passes(2, backwards=2, number=1)] if rank == 1 else [passes(number=1)]
        halved = [scale(32768.0, halved_at)] if rank == 1 else []
        later = [passes(number=number) for number in range(2, 9)]
        return [*SYNCHRONISED, scale(65536.0, 0), passes(), *halved, *odd, *later]

    given = evidence(events, parted(groups=ONE_ODD, step=1))
    assert only(given, "loss_scale_differs")
    # One that was halved only afterwards is no reason.
    given = evidence(lambda rank: events(rank, halved_at=5), parted(groups=ONE_ODD, step=1))
    assert "update_skipped_on_one_rank" in found(given)


def test_of_two_ranks_the_one_that_did_otherwise_than_before_is_the_odd_one():
    def events(rank):
        return [
            *SYNCHRONISED,
            passes(),
            passes(2, backwards=2, number=1) if rank == 0 else passes(number=1),
        ]

    given = evidence(events, parted(groups=((0,), (1,)), step=1), ranks=(0, 1))
    assert next(iter(diagnose(given))).ranks == (0,)


def test_numbers_of_passes_that_are_each_ranks_own_explain_nothing():
    """Rank 1 always has two micro-batches, and agreed until another rank's gradient was changed."""

    def events(rank):
        own = 2 if rank == 1 else 1
        return [*SYNCHRONISED, *(passes(own, backwards=own, number=n) for n in (0, 1))]

    given = evidence(events, parted(groups=((1, 2), (0,)), step=1))
    assert only(given, "gradient_changed_on_one_rank")


def test_of_two_ranks_that_never_did_alike_none_is_the_odd_one():
    def events(rank):
        return [*SYNCHRONISED, passes(1 + rank, backwards=1 + rank)]

    given = evidence(events, parted(groups=((0,), (1,))), ranks=(0, 1))
    assert "update_skipped_on_one_rank" not in found(given)


def test_a_communication_hook_is_likely_where_nothing_else_is_known_and_else_a_fact():
    hooked = [wrap(), wrapper(hooks=["noisy_hook"]), holds(), passes()]
    assert only(evidence(hooked, parted()), "communication_hook")
    (fact,) = diagnose(evidence(hooked))
    assert (fact.cause, fact.strength) == ("communication_hook", Strength.FACT)
    bypassed = [wrap(), wrapper(hooks=["noisy_hook"]), holds(), passes(forwards=0, past=1)]
    assert only(evidence(bypassed, parted()), "ddp_forward_bypassed")


def test_a_gradient_changed_behind_the_reduction_names_the_rank_and_is_only_likely():
    given = evidence([*SYNCHRONISED, passes()], parted(groups=ONE_ODD))
    assert only(given, "gradient_changed_on_one_rank")
    assert not proven(given)
    assert next(iter(diagnose(given))).ranks == (1,)


def test_where_all_ranks_differ_behind_a_complete_reduction_nothing_is_guessed():
    assert found(evidence([*SYNCHRONISED, passes()], parted())) == set()


# Gradients that no wrapper reduces.

BARE = (holds(module=None), update(backwards=1))


def test_a_replica_among_parts_is_to_be_summed_by_the_script():
    given = evidence(BARE, parted(names=("head.weight",)), parts={0: ["body.weight"]})
    assert only(given, "replicated_grad_not_reduced")
    assert not proven(given)


def test_a_replica_among_parts_that_most_ranks_agree_on_was_changed_on_the_others():
    off = parted(names=("head.weight",), groups=((1, 2), (0,)))
    given = evidence(BARE, off, parts={0: ["body.weight"]})
    assert only(given, "gradient_changed_on_one_rank")
    assert not proven(given)
    assert next(iter(diagnose(given))).ranks == (0,)


def test_clips_of_parts_made_by_hand_make_replicas_part():
    def clips(norm, bound=1.0):
        own = {"kind": "norm", "sharded": False, "scale": None, "at": "train.py:5", "bound": bound}
        event = {"kind": "clip", "optimizer": 0, "update": 0, "norm": None, "shards": None}
        return lambda rank: [*BARE, event | {"clips": [own | {"norm": norm(rank)}]}]

    off, parts = parted(names=("head.weight",)), {0: ["body.weight"]}
    given = evidence(clips(lambda rank: 2.0 + rank), off, parts=parts)
    assert proven(given) == {"clip_norm_of_shards"}
    assert diagnose(given)[0].cause == "clip_norm_of_shards"
    # One norm on all ranks; a clip that does not act everywhere; no parts; nothing parts.
    for other in (
        evidence(clips(lambda rank: 2.0), off, parts=parts),
        evidence(clips(lambda rank: 0.5 + rank), off, parts=parts),
        evidence(clips(lambda rank: 2.0 + rank), off),
        evidence(clips(lambda rank: 2.0 + rank), parts=parts),
    ):
        assert "clip_norm_of_shards" not in found(other)


def test_unlike_parts_with_one_gradient_agree_within_groups_of_the_script():
    off = parted("start", "parameter", names=("head.weight",), groups=((0, 2), (1,)))
    made = ([0, 2], [1], [0, 1])
    groups = [{"kind": "new_group", "step": 0, "ranks": ranks} for ranks in made]
    given = evidence([*BARE, *groups], off)
    assert only(given, "wrong_group_after_remesh")
    assert not proven(given)
    # Other groups, or none, or a wrapper that should have made them equal: an initial value.
    for events in ([*BARE, groups[2]], BARE, [*SYNCHRONISED, *groups]):
        assert "wrong_group_after_remesh" not in found(evidence(events, off))
    assert only(evidence(BARE, off), "init_differs")


def test_a_view_with_gaps_in_a_reduction_explains_replicas_that_part():
    event = {"kind": "strided_reduction", "shape": [4, 3], "stride": [6, 1], "at": "train.py:9"}
    given = evidence([*BARE, event], parted(names=("head.weight",)))
    assert proven(given) >= {"strided_view_reduced"}
    assert diagnose(given)[0].cause == "strided_view_reduced"
    assert found(evidence([*BARE, event])) == set()


def test_without_parts_a_parameter_was_left_out_of_the_reduction():
    given = evidence(BARE, parted(names=("head.weight",)))
    assert only(given, "reduction_left_out")
    assert not proven(given)


def reduced(*names):
    return {"kind": "reduced_by_hand", "step": 0, "optimizer": 0, "update": 0, "names": list(names)}


def test_what_was_reduced_by_hand_proves_what_was_not():
    given = evidence([*BARE, reduced("body.weight")], parted(names=("head.weight",)))
    assert proven(given) == {"reduction_left_out"}
    both = evidence([*BARE, reduced(*NAMES)], parted(names=("head.weight",)))
    assert "reduction_left_out" not in found(both)
    # Weights that the script averages after each update are no worse for it.
    later = reduced("head.weight") | {"kind": "weights_reduced"}
    mended = evidence([*BARE, reduced("body.weight"), later], parted(names=("head.weight",)))
    assert "reduction_left_out" not in found(mended)


def test_an_update_or_an_optimizer_that_is_left_out_of_the_reductions():
    events = [*BARE, reduced(*NAMES), reduced() | {"update": 3}, passes(number=3)]
    skipped = evidence(events, parted(step=3))
    assert only(skipped, "reduction_left_out")
    assert "before update 3 none was" in diagnose(skipped)[0].because[0]
    # Reduced for this update as well; never before; only later; averaged as weights.
    mended = reduced(*NAMES) | {"update": 3, "names": list(reversed(NAMES))}
    average = {"kind": "weights_reduced", "count": 2}
    for other in (
        [*BARE, reduced(*NAMES), mended],
        [*BARE, reduced() | {"update": 3}],
        [*BARE, reduced(*NAMES) | {"update": 5}],
        [*events, reduced(*NAMES) | average],
    ):
        assert "reduction_left_out" not in found(evidence(other, parted(step=3)))
    one_each = evidence([*BARE, reduced("other.weight") | {"optimizer": 1}], parted())
    assert only(one_each, "reduction_left_out")
    assert "other.weight, of other optimizers" in diagnose(one_each)[0].because[0]


def test_ranks_of_a_tensor_parallel_mesh_need_the_same_rows():
    def events(rank, rows=(1, 2), parts=3, **fields):
        inputs = {"kind": "inputs", "step": 1, "module": "Net", "update": 1, "rows": list(rows)}
        inputs |= {"random": [], "before": {}, "after": {}}
        return [holds(module=None) | {"parts": parts}, passes(), inputs | fields]

    def named(fixed=(), **fields):
        def of(rank):
            return events(rank, rows=fixed or (rank, 9), **fields)

        return found(evidence(of, parted()))

    assert named() == {"tensor_parallel_inputs_differ"}
    # The same rows, and still unequal: it is not known why.
    assert named(fixed=(1, 2)) == set()
    assert named(parts=0) == {"gradients_never_averaged"}
    assert named(averages=[0, 1, 2]) == set()


def test_reductions_in_another_order_mix_gradients():
    def events(rank):
        return [*BARE, reduced(*(reversed(NAMES) if rank == 1 else NAMES))]

    given = evidence(events, parted(groups=ONE_ODD))
    assert only(given, "collective_order_differs")
    assert next(iter(diagnose(given))).ranks == (1,)

    def others(rank):
        return [*BARE, reduced(*(NAMES[:1] if rank == 1 else NAMES[1:]))]

    assert "collective_order_differs" not in found(evidence(others, parted(groups=ONE_ODD)))


def test_nobody_averages_where_no_gradient_is_equal_in_the_first_update():
    assert only(evidence(BARE, parted()), "gradients_never_averaged")
    late = evidence([holds(module=None), update(4, backwards=1)], parted(step=4))
    assert found(late) == set()
    odd = evidence(BARE, parted(groups=ONE_ODD))
    assert found(odd) == set()
    # Weights are averaged every few updates instead.
    averaged = {
        "kind": "weights_reduced",
        "step": 4,
        "optimizer": 0,
        "update": 4,
        "count": 1,
        "names": [NAMES[0]],
    }
    (given,) = diagnose(evidence([*BARE, averaged], parted()))
    assert (given.cause, given.strength) == ("gradients_never_averaged", Strength.FACT)
    assert only(
        evidence([*BARE, averaged | {"optimizer": 1}], parted()), "gradients_never_averaged"
    )


@pytest.mark.parametrize(
    ("kind", "updates", "names", "count", "meant"),
    [
        ("weights_reduced", (4, 8, 12), NAMES, 2, True),
        ("reduced_as_one", (4, 8), NAMES, 2, True),
        # More of them than are written down.
        ("weights_reduced", (4, 8), NAMES[:1], 300, True),
        # Once is what makes them equal to begin with.
        ("weights_reduced", (4,), NAMES, 2, False),
        ("reduced_as_one", (0, 4), NAMES, 2, False),
        # Some of those that differ are never averaged.
        ("weights_reduced", (4, 8), NAMES[:1], 1, False),
    ],
)
def test_averages_that_the_script_makes_itself_are_on_purpose(kind, updates, names, count, meant):
    def averages(number):
        return {
            "kind": kind,
            "step": number,
            "optimizer": 0,
            "update": number,
            "count": count,
            "names": list(names),
        }

    events = [*BARE, *map(averages, updates)]
    said = averages_by_hand(evidence(events, parted()))
    assert (said is not None) is meant
    assert not meant or "before updates 4, 8" in said
    # Not on every rank: there is no average.
    one = evidence(lambda rank: events if rank else BARE, parted())
    assert averages_by_hand(one) is None
    # The gradients of some are averaged, so the others should be.
    assert averages_by_hand(evidence(events, parted(names=NAMES[:1]))) is None


@pytest.mark.parametrize(("rounds", "meant"), [((1,), False), ((1, 2), True), ((), False)])
def test_rounds_of_local_training_with_an_optimizer_each(rounds, meant):
    some = parted(names=NAMES[:1])
    for divergence in (parted(), some):
        said = averages_by_hand(evidence(BARE, divergence, made_equal={0: rounds}))
        assert (said is not None) is meant
    # Of another optimizer; below a wrapper; of one rank alone.
    assert averages_by_hand(evidence(BARE, some, made_equal={1: (2, 3)})) is None
    assert averages_by_hand(evidence(SYNCHRONISED, some, made_equal={0: (1, 2)})) is None
    odd = parted(groups=ONE_ODD)
    assert averages_by_hand(evidence(BARE, odd, made_equal={0: (1, 2)})) is None


def test_ranks_that_agree_as_their_groups_do_are_reduced_over_groups():
    ranks = (0, 1, 2, 3)
    pairs = ((0, 1), (2, 3))

    def events(rank):
        return [wrap(ranks=pairs[rank // 2]), wrapper(), holds(), passes()]

    assert only(evidence(events, parted(groups=pairs), ranks=ranks), "wrong_group")
    across = parted(groups=((0, 2), (1, 3)))
    assert found(evidence(events, across, ranks=ranks)) == set()


# Before the first update.


def test_unequal_weights_and_equal_gradients_are_an_initialisation_of_its_own():
    start = parted("start", "parameter")
    assert only(evidence([holds(module=None)], start), "init_differs")


def test_a_wrapper_that_sends_nothing_around_leaves_them_unequal():
    def events(rank):
        return [wrap(digests=(rank, 2)), wrapper(digests=[rank, 2]), holds(), passes()]

    assert only(evidence(events, parted("start", "parameter")), "init_differs")


def test_weights_that_were_equal_when_they_were_wrapped_were_written_since():
    start = parted("start", "parameter")
    given = evidence(SYNCHRONISED, start)
    assert proven(given) == found(given) == {"out_of_band_write"}
    # What was loaded before goes the way of all weights; what all ranks load alike parts nothing.
    for events in ([load(), *SYNCHRONISED], [*SYNCHRONISED, load(content=7)]):
        assert proven(evidence(events, start)) == {"out_of_band_write"}
    apart = evidence(lambda rank: [*SYNCHRONISED, load(content=rank)], start)
    assert only(apart, "weights_not_resynced_on_load")

    def drawn(rank):
        return [wrap(digests=(rank, 2)), wrapper(digests=[1, 2]), holds()]

    # They were sent around, or they were not.
    assert found(evidence(drawn, start)) == set()


@pytest.mark.parametrize(
    "other",
    [
        {"names": tuple(reversed(NAMES))},
        {"names": (*NAMES, "extra.weight")},
        {"shape": (3,)},
        {"frozen": ("head.weight",)},
        {"buffers": ("norm.running_mean",)},
    ],
)
def test_modules_that_are_not_the_same_are_found_with_the_odd_rank(other):
    def events(rank):
        return [wrap(**(other if rank == 1 else {})), wrapper(), holds()]

    for given in (evidence(events), evidence(events, parted("start", "parameter"))):
        assert proven(given) == {"structure_differs"}
        assert next(iter(diagnose(given))).ranks == (1,)


def test_stages_with_groups_of_their_own_may_be_different_modules():
    def events(rank):
        return [wrap(names=(f"stage{rank}.weight",), ranks=(rank,)), wrapper(), holds()]

    assert found(evidence(events)) == set()


def test_a_wrapper_that_some_ranks_lack_is_no_other_structure():
    def events(rank):
        return [wrap(), wrapper(), *([wrap(1)] if rank == 0 else [])]

    assert found(evidence(events)) == set()


def load(step=0, what="module", content=None):
    usual = {"kind": "load", "step": step, "what": what, "class": "Net", "at": "train.py:20"}
    return usual | {"content": content}


def test_a_checkpoint_that_one_rank_loads_is_told_from_an_initialisation():
    def events(rank):
        return [holds(module=None), *([load()] if rank == 0 else [])]

    given = evidence(events, parted("start", "parameter", groups=((1, 2), (0,))))
    assert proven(given) == {"weights_not_resynced_on_load"}
    assert next(iter(diagnose(given))).ranks == (0,)


def test_a_load_on_all_ranks_in_the_middle_of_a_run_after_which_weights_differ():
    after = parted("parameters", "parameter", step=2)

    def events(rank, step=2, loads=RANKS):
        loaded = [load(step)] if rank in loads else []
        return [*SYNCHRONISED, passes(), passes(number=1), *loaded, passes(number=2)]

    given = evidence(events, after)
    assert only(given, "read_before_write")
    assert next(iter(diagnose(given))).where == load(2)["at"]
    # One that came before, or on one rank only, is another matter.
    for other in ({"step": 1}, {"loads": (0,)}):
        given = evidence(lambda rank, other=other: events(rank, **other), after)
        assert "read_before_write" not in found(given)


def test_weights_that_part_between_wrapping_and_the_first_call_after_a_load():
    def events(rank):
        return [wrap(digests=(1, 2)), load(3, "optimizer"), wrapper(step=3, digests=[1, 10 + rank])]

    given = evidence(events)
    assert only(given, "weights_not_resynced_on_load")
    assert next(iter(diagnose(given))).tensor == "head.weight"

    def without_load(rank):
        return [event for event in events(rank) if event["kind"] != "load"]

    assert found(evidence(without_load)) == set()

    def drawn(rank):
        # A wrapper makes equal what every rank has drawn for itself.
        return [wrap(digests=(1, 10 + rank)), load(), wrapper(digests=[1, 10])]

    assert found(evidence(drawn)) == set()

    def never_sent(rank):
        return [wrap(digests=(1, 10 + rank)), load(), wrapper(digests=[1, 10 + rank])]

    assert "weights_not_resynced_on_load" not in found(evidence(never_sent))


def draws(before=5, after=6, generator="python", **more):
    state = {"torch": 1, "python": 2, "numpy": 3}
    return {
        "kind": "draws",
        "step": 0,
        "number": 1,
        "workers": 2,
        "worker": 0,
        "class": "Images",
        "at": "train.py:7",
        "indices": [0, 3],
        "before": state | {generator: before},
        "after": state | {generator: after},
    } | more


def test_samples_that_are_augmented_alike_on_all_ranks():
    def events(rank, **more):
        return [*SYNCHRONISED, draws(indices=[rank, rank + 3], **more)]

    given = evidence(events)
    assert proven(given) == {"rng_not_decorrelated"}
    (first, *_) = diagnose(given)
    assert first.where == "train.py:7"
    assert "by the workers of the loader, Images drew the same numbers" in first.because[0]
    assert "from Python's, the one time" in first.because[0]
    both = evidence(lambda r: [*events(r), *events(r, generator="torch", number=2, worker=None)])
    (first, *_) = diagnose(both)
    assert "from torch's generator and Python's, each of the 2 times" in first.because[0]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(lambda rank: {"before": rank}, id="from states of their own"),
        pytest.param(lambda rank: {"after": 7 + rank}, id="seeded by sample"),
        pytest.param(lambda rank: {"after": 5}, id="nothing is drawn"),
        pytest.param(lambda rank: {"after": 5 + (rank == 1)}, id="drawn by one rank"),
        pytest.param(lambda rank: {"indices": [0, 3]}, id="the same samples on all"),
        pytest.param(lambda rank: {"number": rank}, id="of other passes"),
    ],
)
def test_samples_that_are_not_augmented_alike_or_may_be(more):
    def events(rank):
        return [*SYNCHRONISED, draws(**{"indices": [rank]} | more(rank))]

    assert not proven(evidence(events))


def test_a_generator_that_came_into_being_with_the_first_draw_says_nothing():
    def events(rank):
        one = draws(indices=[rank])
        del one["before"]["numpy"]
        return [*SYNCHRONISED, one]

    (first, *_) = diagnose(evidence(events))
    assert "NumPy" not in first.because[0]


def test_samples_that_are_augmented_alike_in_one_pass_only_are_none():
    def events(rank):
        second = draws(number=2, indices=[rank], before=rank, after=10 + rank)
        return [*SYNCHRONISED, draws(indices=[rank]), second]

    assert not proven(evidence(events))


# What an update is made from besides gradients.


def setting(name, **more):
    return parted(kind="setting", names=(f"param_groups[0]['{name}']",), groups=ONE_ODD, **more)


def test_a_learning_rate_of_its_own_is_a_schedule_and_is_shown():
    given = evidence(SYNCHRONISED, setting("lr", values={0: "0.1", 1: "0.2", 2: "0.1"}))
    assert only(given, "rank_dependent_schedule")
    first = next(iter(diagnose(given)))
    assert "0.2 on rank 1" in first.because[0]
    assert first.ranks == (1,)


def test_any_other_setting_is_a_hyperparameter():
    assert only(evidence(SYNCHRONISED, setting("weight_decay")), "hyperparameters_differ")
    assert only(evidence(SYNCHRONISED, setting("betas'][1]")), "hyperparameters_differ")


def test_state_that_differs_before_the_first_update():
    given = evidence(SYNCHRONISED, parted("start", "state exp_avg", groups=((1, 2), (0,))))
    assert only(given, "optimizer_state_differs")


def state(number, digest, optimizer=0, name="body.weight"):
    return {
        "kind": "state",
        "step": number,
        "optimizer": optimizer,
        "update": number,
        "digests": {"exp_avg": {name: digest, "head.weight": 7}},
    }


def test_state_that_differed_before_the_weights_explains_them():
    def events(rank):
        return [*SYNCHRONISED, state(1, 5), state(2, 5 + (rank == 1)), passes(number=4)]

    after = parted("parameters", "parameter", ("body.weight",), ONE_ODD, step=4)
    assert only(evidence(events, after), "optimizer_state_differs")
    # The state of this very update is made from it, and the state of others does not touch it.
    assert only(evidence(events, replace(after, step=2)), "out_of_band_write")
    other = parted("parameters", "parameter", ("head.weight",), ONE_ODD, step=4)
    assert only(evidence(events, other), "out_of_band_write")


def test_the_state_of_a_model_of_another_group_explains_nothing():
    def events(rank):
        return [*SYNCHRONISED, state(1, 5), state(2, 5 + (rank == 2)), passes(number=4)]

    groups = ((0,), (1,))
    after = parted("parameters", "parameter", ("body.weight",), groups, step=4)
    assert only(evidence(events, after), "out_of_band_write")


def test_state_that_one_rank_has_written_explains_weights_that_part_with_the_next_update():
    def events(rank, number=4, name="body.weight", writers=(1,), **more):
        wrote = {"state_written": [name], "states_written": 1} | more if rank in writers else {}
        return [*SYNCHRONISED, passes(number=number, **wrote)]

    after = parted("parameters", "parameter", ("body.weight",), ONE_ODD, step=4)
    given = evidence(events, after)
    assert proven(given) == {"optimizer_state_differs"}
    (first, *_) = diagnose(given)
    assert (first.ranks, first.tensor) == ((1,), "body.weight")
    assert "between updates 3 and 4" in first.because[0]
    # Of another update or tensor, by all ranks, or weights at the same time: another matter.
    for other in (
        lambda rank: events(rank, 3),
        lambda rank: events(rank, name="head.weight"),
        lambda rank: events(rank, writers=(0, 1, 2)),
        lambda rank: events(rank, written=["body.weight"], parameters_written=1),
    ):
        assert only(evidence(other, after), "out_of_band_write")


def test_a_write_between_updates_on_one_rank_is_proven_by_its_version():
    def events(rank):
        wrote = {"written": ["body.weight"], "parameters_written": 1} if rank == 1 else {}
        return [*SYNCHRONISED, passes(number=4, **wrote)]

    after = parted("parameters", "parameter", ("body.weight",), ONE_ODD, step=4)
    given = evidence(events, after)
    assert proven(given) == {"out_of_band_write"}
    assert next(iter(diagnose(given))).ranks == (1,)


def test_a_write_to_another_tensor_or_in_an_earlier_window_proves_nothing():
    def events(rank, number=4, name="head.weight"):
        wrote = {"written": [name], "parameters_written": 1} if rank == 1 else {}
        return [*SYNCHRONISED, passes(number=number, **wrote)]

    after = parted("parameters", "parameter", ("body.weight",), ONE_ODD, step=4)
    assert only(evidence(events, after), "out_of_band_write")
    assert not proven(evidence(events, after))
    assert not proven(evidence(lambda rank: events(rank, 3, "body.weight"), after))


def test_a_write_on_every_rank_is_likely_at_most():
    wrote = {"written": ["body.weight"], "parameters_written": 1}
    after = parted("parameters", "parameter", ("body.weight",), EACH, step=4)
    given = evidence([*SYNCHRONISED, passes(number=4, **wrote)], after)
    assert only(given, "out_of_band_write")
    assert not proven(given)


def scale(value, step=3):
    return {"kind": "loss_scale", "step": step, "scaler": 0, "scale": value}


def test_a_loss_scale_of_its_own():
    def events(rank):
        grown = [scale(131072.0)] if rank != 1 else []
        return [*SYNCHRONISED, scale(65536.0, 0), *grown, passes(number=8)]

    assert only(evidence(events), "loss_scale_differs")
    by_hand = {"kind": "reduced_by_hand", "step": 0, "optimizer": 0, "update": 0, "names": ["w"]}
    given = evidence(lambda rank: [by_hand, *events(rank)[3:]])
    assert "loss_scale_differs" in found(given)
    # Ranks without a wrapper may each train a model of their own.
    assert found(evidence(lambda rank: events(rank)[3:])) == set()


def test_a_scale_that_one_rank_has_not_reached_yet_differs_from_nothing():
    def events(rank):
        seen = [scale(32768.0), passes(number=8)] if rank else [passes(number=2)]
        return [*SYNCHRONISED, scale(65536.0, 0), *seen]

    assert found(evidence(events)) == set()


# Buffers.

MEAN = ("norm.running_mean",)


def evaluation(what, source, average=False, module=0):
    return {
        "kind": "evaluation",
        "step": 0,
        "source": source,
        "what": what,
        "module": module,
        "average": average,
        "class": "Net",
        "at": "train.py:30",
    }


@pytest.mark.parametrize(
    ("what", "sync", "cause"),
    [
        ("wrapper", False, "bn_stats_local"),
        ("inner", False, "bn_stats_local"),
        ("inner", True, "bn_stats_local"),
        ("wrapper", True, None),
    ],
)
def test_running_statistics_of_the_model_that_is_trained(what, sync, cause):
    source = "module 0 (Net)"
    events = [wrap(), wrapper(sync_buffers=sync), evaluation(what, source)]
    given = evidence(events, parted("evaluation", "buffer", MEAN), source=source)
    assert found(given) == ({cause} if cause else set())


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        (("norm.running_var",), "sync_norm_local_count"),
        (("norm.running_mean", "norm.running_var"), "bn_stats_local"),
        (("norm.running_var", "other.running_mean"), "bn_stats_local"),
    ],
)
def test_variances_that_part_alone_were_combined_with_the_wrong_counts(names, cause):
    source = "module 0 (Net)"
    events = [wrap(), wrapper(), evaluation("inner", source)]
    given = evidence(events, parted("evaluation", "buffer", names), source=source)
    assert found(given) == {cause}


@pytest.mark.parametrize("average", [True, False])
def test_running_statistics_of_an_average(average):
    source = "Net, which no wrapper holds"
    events = [*SYNCHRONISED, evaluation("other", source, average, None)]
    given = evidence(events, parted("evaluation", "buffer", MEAN), source=source)
    assert only(given, "ema_buffers_local")
    assert bool(proven(given)) is average


def written(module=0, number=2, overwritten=MEAN):
    return {
        "kind": "buffers_written",
        "step": number,
        "module": module,
        "update": number,
        "buffers": list(MEAN),
        "overwritten": list(overwritten),
    }


def test_a_buffer_that_rank_0_has_not_written_is_overwritten():
    def events(rank, sync=True, writers=(1,)):
        told = wrapper(sync_buffers=sync)
        return [wrap(), told, *([written()] if rank in writers else [])]

    assert only(evidence(events), "buffer_broadcast")
    assert found(evidence(lambda rank: events(rank, sync=False))) == set()
    assert found(evidence(lambda rank: events(rank, writers=(0,)))) == set()
    assert found(evidence(lambda rank: events(rank, writers=RANKS))) == set()


def test_a_buffer_that_holds_what_rank_0_has_is_not_overwritten():
    def events(rank, *lost):
        own = [written(overwritten=MEAN if rank in lost else ())] if rank else []
        return [wrap(), wrapper(sync_buffers=True), *own]

    assert found(evidence(events)) == set()
    (given,) = diagnose(evidence(lambda rank: events(rank, 2)))
    assert (given.cause, given.ranks) == ("buffer_broadcast", (2,))


# Nothing, and the catalogue as a whole.


def test_nothing_is_found_where_nothing_is_wrong():
    assert diagnose(evidence([*SYNCHRONISED, passes(), passes(number=1)])) == []


def test_no_rule_needs_more_than_a_divergence():
    for phase, kind in (
        ("start", "parameter"),
        ("gradients", "gradient"),
        ("gradients", "setting"),
        ("parameters", "parameter"),
        ("evaluation", "buffer"),
    ):
        for events in ([], [update()]):
            given = evidence(events, parted(phase, kind))
            for one in diagnose(given):
                assert "rule itself failed" not in one.because[0], one


def test_every_cause_has_all_its_texts():
    for cause in catalogue().values():
        for text in (cause.family, cause.sees, cause.why, cause.confirm, cause.change, cause.fix):
            assert text.strip() == text, cause.name
            assert text, cause.name
        for sentence in (cause.sees, cause.why, cause.confirm):
            assert sentence.endswith((".", '".')), cause.name
        assert not cause.change.endswith("."), cause.name
        assert len(cause.change) <= 90, cause.name
        assert max(map(len, cause.fix.splitlines())) <= 100, cause.name
        for thread in cause.reported:
            owner, _, number = thread.partition("#")
            assert owner.count("/") == 1, thread
            assert number.isdigit(), thread


def test_no_rule_needs_torch():
    for module in pkgutil.iter_modules(harness.causes.__path__):
        source = inspect.getsource(importlib.import_module(f"harness.causes.{module.name}"))
        assert "import torch" not in source, module.name


@pytest.mark.parametrize(
    ("losses", "ranks"),
    [
        ((1.0, 1.2, 14.0), (2,)),
        ((1.0, 0.05, 1.1), (1,)),
        ((1.0, 1.2, 9.0), None),
        ((1.0, math.nan, 1.0), None),
        ((0.0, 0.0, 14.0), None),
    ],
)
def test_a_loss_that_is_far_from_all_others_is_a_fact(losses, ranks):
    def events(times):
        return lambda rank: [update(n, losses=[losses[rank] / (n + 1)]) for n in range(times)]

    said = [one for one in diagnose(evidence(events(9))) if one.cause == "loss_far_from_others"]
    assert [one.ranks for one in said] == ([] if ranks is None else [ranks])
    assert all(one.strength == Strength.FACT for one in said)
    # A batch or two may be anything.
    few = {one.cause for one in diagnose(evidence(events(4)))}
    assert "loss_far_from_others" not in few


@pytest.mark.parametrize(
    ("losses", "sure"),
    [
        # By rank and update: NaN on rank 1 before update 2, on all of them before update 3.
        ({(1, 2): math.nan} | {(r, u): math.nan for r in RANKS for u in (3, 4)}, Strength.PROVEN),
        # Skipped, and on it goes.
        ({(1, 2): math.inf}, Strength.FACT),
        ({(r, 2): math.nan for r in RANKS}, None),
        ({}, None),
    ],
)
def test_a_loss_that_is_first_not_finite_on_one_rank(losses, sure):
    def events(rank):
        return [update(n, losses=[losses.get((rank, n), 1.0)]) for n in range(5)]

    said = {one.cause: one for one in diagnose(evidence(events))}
    one = said.get("loss_not_finite_on_one_rank")
    assert (None if one is None else one.strength) == sure
    assert one is None or (one.ranks, one.step) == ((1,), 2)


# Gradients that nothing is made of.

CLEARED = {"cleared_before_step of optimizer 0": 1}


@pytest.mark.parametrize(
    ("each", "seen"),
    [
        # What the first update was made from is not known.
        ([{}, *[CLEARED] * 3], True),
        ([{}, *[CLEARED] * 2], False),
        ([{}, *[CLEARED] * 9, {}], False),
        # A step that is taken all the same after a batch whose loss is of no use.
        ([{}, *[CLEARED | {"losses": [math.nan]}] * 4], False),
        # The script makes its updates itself, and steps for the sake of a scheduler.
        ([{}, *[CLEARED | {"parameters_written": 2}] * 4], False),
        # Backward was made, and never reached a parameter of this optimizer.
        ([{}] * 5, False),
    ],
)
def test_an_optimizer_that_never_finds_a_gradient(each, seen):
    events = [update(number, backwards=1, **fields) for number, fields in enumerate(each)]
    cause = "gradients_cleared_before_step"
    assert (cause in proven(evidence(events))) is seen
    # A rank may hold no part of a split parameter, and so have no gradient.
    usual = [update(number, backwards=1) for number in range(len(each))]
    assert cause not in found(evidence(lambda rank: usual if rank == 1 else events))


def test_an_optimizer_that_never_finds_a_gradient_beside_one_that_does():
    events = [
        update(number, optimizer=optimizer, backwards=1, **(CLEARED if not optimizer else {}))
        for number in range(4)
        for optimizer in (0, 1)
    ]
    assert "gradients_cleared_before_step" in proven(evidence(events))
    other = [update(number, optimizer=1, backwards=1, **CLEARED) for number in range(4)]
    assert "gradients_cleared_before_step" not in found(evidence(other))
