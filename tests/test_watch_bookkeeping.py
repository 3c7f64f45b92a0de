"""The rules of the causes that leave replicas equal: each recognises its fault and not its like."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.causes import Strength, catalogue
from harness.watch.evidence import Evidence

FACT, LIKELY, PROVEN = Strength.FACT, Strength.LIKELY, Strength.PROVEN
RANKS = 2


def evidence(*events, ranks=RANKS):
    """Give every rank the events, numbered by update; functions are asked for those of a rank."""
    journals = {}
    for rank in range(ranks):
        own = [event(rank) if callable(event) else event for event in events]
        journals[rank] = [{"step": 0} | event for event in own if event is not None]
    return Evidence(world_size=ranks, ranks=tuple(range(ranks)), journals=journals)


def strength(cause, *events, **options):
    found = catalogue()[cause].diagnose(evidence(*events, **options))
    return None if found is None else found.strength


def handed_out(**fields):
    """A pass over a loader with a distributed sampler that shuffles; fields may ask the rank."""
    usual = {
        "kind": "pass",
        "number": 1,
        "began": 0,
        "loader": 0,
        "dataset": 0,
        "class": "Clips",
        "length": 40,
        "style": "map",
        "sampler": "DistributedSampler",
        "num_replicas": RANKS,
        "rank": lambda rank: rank,
        "epoch": 0,
        "seed": 0,
        "shuffle": True,
        "samplers_length": 40,
        "total_size": 40,
        "at": "train.py:9",
        "updates": {"0": 5},
        "count": 20,
        "order": 1,
        "batch_sizes": [4, 4],
        "indices": [],
        "content": [],
    }
    mixed = usual | fields
    return lambda rank: {k: v(rank) if callable(v) else v for k, v in mixed.items()}


EVALUATED = {"updates": {}, "shuffle": False}


def went_in(update, **fields):
    usual = {
        "kind": "inputs",
        "module": "module 0",
        "update": update,
        "averages": list(range(RANKS)),
        "hooks": 0,
        "rows": lambda rank: [10 * update, 10 * update + 1 + rank],
        "count": 4,
        "random": [],
        "before": lambda rank: {"torch": 100 * rank},
        "after": lambda rank: {"torch": 100 * rank + 1},
    }
    mixed = {key: value for key, value in (usual | fields).items() if value is not None}
    return lambda rank: {k: v(rank) if callable(v) else v for k, v in mixed.items()}


def window(update, terms=None, **fields):
    """A window with one backward pass from one term: a mean over so many, per rank."""
    usual = {"kind": "update", "step": update, "optimizer": 0, "update": update, "backwards": 1}

    def of(rank):
        asked = {k: v(rank) if callable(v) else v for k, v in fields.items()}
        made = None if terms is None else {"loss_terms": [[t] for t in terms(rank)]}
        return usual | {"backward_at": ["train.py:20"]} | (made or {}) | asked

    return of


def mean(count, factor=1.0, by=(), name="NllLoss"):
    return [name, factor / count, count, factor, True, False, [list(one) for one in by]]


def total(count, weight, by=()):
    return ["NllLoss", weight, count, weight, False, False, [list(one) for one in by]]


# Data.


def test_epochs_that_repeat():
    def train(first, second):
        return strength("set_epoch_missing", handed_out(**first), handed_out(**second))

    assert train({}, {}) == PROVEN
    assert train({}, {"epoch": 1, "order": 2}) is None
    assert train({"shuffle": False}, {"shuffle": False}) is None
    # Evaluated twice; trained by an optimizer each; too few samples to have another order.
    assert train(EVALUATED | {"shuffle": True}, EVALUATED | {"shuffle": True}) is None
    assert train({}, {"updates": {"1": 5}}) is None
    assert train({"count": 2}, {"count": 2}) is None


def test_parts_of_the_data_that_are_as_large_are_no_epochs():
    def train(dataset, *contents):
        passes = [
            handed_out(number=n, dataset=n * dataset, content=[[i, c + i] for i in range(6)])
            for n, c in enumerate(contents)
        ]
        return strength("set_epoch_missing", *passes)

    # A data set for each part, of which none holds what another does.
    assert train(1, 100, 200, 300) is None
    assert train(1, 100, 200, 200) == PROVEN
    # One data set: its samples may be augmented, or be others by now.
    assert train(0, 100, 200) == LIKELY
    assert train(0, 100, 100) == PROVEN


def test_a_phase_that_repeats_an_epoch_on_purpose_is_told_of_epochs():
    epochs = [{"epoch": e, "order": e} for e in (0, 0, 1, 1)]
    assert strength("set_epoch_missing", *(handed_out(**e) for e in epochs)) is None


SAME_ROWS = {"rows": [1, 2, 3, 4]}
WHOLE = {"sampler": "RandomSampler", "num_replicas": None, "count": 40}
"""A loader that goes through all samples on each rank."""


def rows_of(update):
    return {"rows": [update, update + 50]}


def test_the_same_rows_on_all_ranks():
    looks = [went_in(update, **rows_of(update)) for update in range(3)]
    assert strength("data_not_sharded", *looks, handed_out(**WHOLE)) == PROVEN
    assert strength("data_not_sharded", *looks, handed_out(style="iterable")) == PROVEN
    # Rows that come from no loader may be meant to be the same.
    assert strength("data_not_sharded", *looks) == FACT
    own = [went_in(update) for update in range(3)]
    assert strength("data_not_sharded", *own, handed_out()) is None
    # Tensor parallel: the ranks do not average.
    parallel = [went_in(u, averages=None, **rows_of(u)) for u in range(3)]
    assert strength("data_not_sharded", *parallel, handed_out(**WHOLE)) is None
    # The same constant at each step is no sample.
    constant = [went_in(u, **SAME_ROWS) for u in range(3)]
    assert strength("data_not_sharded", *constant, handed_out(**WHOLE)) is None


CONTENT = [[index, 900 + index] for index in range(6)]


def test_all_samples_on_each_rank_in_an_order_of_its_own():
    looks = [went_in(update) for update in range(3)]

    def train(**fields):
        own = WHOLE | {"order": lambda rank: rank, "content": CONTENT} | fields
        return strength("data_not_sharded", *looks, handed_out(**own))

    assert train() == LIKELY
    # A data set of its own on each rank; batches shared out in the loop; a part of the samples.
    assert train(content=lambda rank: [[i, 900 + i + 100 * rank] for i in range(6)]) is None
    assert train(batch_sizes=[8, 8]) is None
    assert train(count=20) is None
    # As many draws as there are samples, with replacement.
    assert train(indices=list(range(39)), every=1) == LIKELY
    assert train(indices=list(range(12)), every=2) is None


def test_samplers_with_seeds_of_their_own():
    cause = "order_differs_before_sampler"
    assert strength(cause, handed_out(seed=lambda rank: rank)) == PROVEN
    assert strength(cause, handed_out(seed=lambda rank: rank, shuffle=False)) is None
    # Two groups of ranks, each with half of the data.
    assert strength(cause, handed_out(seed=lambda rank: rank, num_replicas=1)) is None


def test_other_samples_at_the_same_position():
    def train(content):
        return strength("order_differs_before_sampler", handed_out(content=content))

    shuffled = [[0, 3, 1, 4, 2, 5], [5, 1, 0, 2, 4, 3]]
    assert train(lambda rank: [[i, 900 + n] for i, n in enumerate(shuffled[rank])]) == PROVEN
    # One pass: no position is read by two ranks, yet the samples are.
    halves = [[0, 3, 1, 2], [2, 1, 0, 3]]
    apart = train(lambda rank: [[2 * i + rank, 900 + n] for i, n in enumerate(halves[rank])])
    assert apart == PROVEN
    assert train(CONTENT) is None
    # Augmentation: never the same twice, on no rank.
    assert train(lambda rank: [[i, 1000 * rank + i] for i in range(6)]) is None
    # A list that holds everything twice.
    assert train(lambda rank: [[i + 7 * rank, 900 + i] for i in range(6)]) is None
    # Few values, so that samples are equal by chance: on one rank as well.
    assert train(lambda rank: [[2 * i + rank, 900 + i % 3] for i in range(9)]) is None


def test_a_data_set_that_is_reordered_between_passes():
    def passes(*orders):
        """Ranks take turns; `orders` say which samples lie at the positions of each pass."""
        return [
            handed_out(
                number=number,
                shuffle=False,
                content=lambda rank, order=order: [
                    [i, 900 + n] for i, n in enumerate(order) if i % RANKS == rank
                ],
            )
            for number, order in enumerate(orders)
        ]

    cause = "order_differs_before_sampler"
    assert strength(cause, *passes(range(12), [7, 4, 11, 0, 9, 2, 5, 10, 1, 8, 3, 6])) is None


TRAINED = window(0)


def evaluated(reduced=None, gathered=False, **fields):
    events = [TRAINED, handed_out(**(EVALUATED | {"total_size": 42, "count": 21} | fields))]
    if reduced:
        mine, everywhere = reduced
        events.append({"kind": "reduced", "mine": mine, "all": everywhere, "at": "eval.py:3"})
    if gathered:
        events.append({"kind": "gathered", "at": "eval.py:2"})
    return strength("eval_padding", *events)


def test_padding_counts_where_it_is_counted():
    assert evaluated(([9.0, 21.0], [18.0, 42.0])) == PROVEN
    assert evaluated(([0.5], [1.0])) == LIKELY
    assert evaluated(([0.5], [1.0]), gathered=True) == FACT
    assert evaluated() == FACT
    assert evaluated(([9.0, 20.0], [18.0, 40.0]), total_size=40, count=20) is None
    # Left out by drop_last.
    assert evaluated(([9.0, 19.0], [18.0, 38.0]), total_size=38, count=19) == PROVEN
    # Repeated samples were left out where they were counted.
    assert evaluated(([9.0, 19.0], [18.0, 40.0])) is None
    # A flag, which is no score.
    assert evaluated(([0.0], [0.0])) == FACT
    # Not gone through to the end.
    assert evaluated(([9.0, 8.0], [18.0, 42.0]), count=8) is None


def split(train, valid, began=5, **fields):
    part = {"part_of": 1, "whole_length": 40, **fields}
    return strength(
        "train_validation_overlap",
        handed_out(within=train, **part),
        handed_out(within=valid, began=began, **(EVALUATED | part)),
        window(0),
    )


def test_parts_that_overlap():
    assert split([1, 2, 3, 4], [4, 5, 6]) == PROVEN
    assert split([1, 2, 3], [4, 5, 6]) is None
    # Chosen by its score, and trained on from then on.
    assert split([1, 2, 3, 4], [4, 5, 6], began=0) is None
    # The score on what was trained on is wanted.
    assert split([1, 2, 3, 4], [2, 3]) is None
    # Also where ranks share it out in another way than for training.
    assert split(lambda r: [r, r + 2, r + 4], lambda r: [3 * r, 3 * r + 1, 3 * r + 2]) is None
    # Each rank splits for itself.
    assert split(lambda r: [1, 2, 3 + r], lambda r: [4 - r, 9]) == LIKELY
    own_data = {"num_replicas": None}
    assert split(lambda r: [1, 2, 3 + r], lambda r: [4 - r, 9], **own_data) is None


def test_folds_of_a_cross_validation_overlap():
    part = {"part_of": 1, "whole_length": 40}
    first = handed_out(within=[1, 2], updates={"0": 5}, **part)
    second = handed_out(within=[3, 4], updates={"1": 5}, began=5, step=9, **part)
    held_out = handed_out(within=[2, 9], began=9, step=9, **(EVALUATED | part))
    windows = [window(0), lambda _: {"kind": "update", "step": 6, "optimizer": 1, "update": 0}]
    events = (first, second, held_out, *windows)
    assert strength("train_validation_overlap", *events) is None


# Randomness.

DROPS = {"random": ["Dropout"]}
ONE_STATE = {"before": {"torch": 5}, "after": {"torch": 6}}


def test_the_same_masks_on_all_ranks():
    cause = "rng_not_decorrelated"
    assert strength(cause, went_in(0, **DROPS, **ONE_STATE)) == PROVEN
    assert strength(cause, went_in(0, **DROPS)) is None
    # Equal seeds without anything that draws; drawn, but not by a layer for each element.
    idle = {"before": {"torch": 5}, "after": {"torch": 5}}
    assert strength(cause, went_in(0, **DROPS, **idle)) is None
    assert strength(cause, went_in(0, **ONE_STATE)) is None
    # Ranks that share a sample draw the same masks on purpose.
    assert strength(cause, went_in(0, averages=None, **DROPS, **ONE_STATE)) is None
    later = went_in(1, **DROPS)
    assert strength(cause, went_in(0, **DROPS, **ONE_STATE), later) is None


def test_noise_that_forward_draws_alike_is_a_fact():
    cause = "rng_not_decorrelated"
    looks = [went_in(u, **ONE_STATE) for u in range(3)]
    assert strength(cause, *looks) == FACT
    assert strength(cause, went_in(0, **ONE_STATE)) is None
    assert strength(cause, *(went_in(u) for u in range(3))) is None
    still = {"before": {"torch": 5}, "after": {"torch": 5}}
    assert strength(cause, *(went_in(u, **still) for u in range(3))) is None


def stream(**fields):
    usual = {"style": "iterable", "step": 8, "workers": 2, "updates": {"0": 8}}
    about = handed_out(**(usual | fields))
    return lambda rank: {k: v for k, v in about(rank).items() if k not in ("count", "indices")}


def test_a_stream_that_is_not_divided_by_rank():
    def trained(of, **fields):
        looks = [went_in(u, rows=lambda r, u=u: of(r, u)) for u in range(8)]
        return strength("data_not_sharded", stream(**fields), *looks)

    def shuffled(rank, update):
        # Other orders: three batches of ten are the other's, at another time.
        return [(10 * ((update + 2 * rank) % 8)) + i for i in range(10)]

    assert trained(shuffled) == LIKELY
    assert trained(lambda r, u: [1000 * r + 10 * u + i for i in range(10)]) is None
    # Samples that are like each other say nothing, nor do few; an index says more than content.
    assert trained(lambda r, u: [i % 5 + r for i in range(10)]) is None
    assert trained(lambda r, u: [2 * ((u + r) % 8)]) is None
    assert trained(shuffled, style="map") is None


def test_a_stream_that_is_not_divided_by_worker():
    def trained(of, **fields):
        looks = [went_in(u, rows=lambda r, u=u: of(r, u)) for u in range(8)]
        return strength("stream_repeated_by_workers", stream(**fields), *looks)

    def twice(rank, update):
        return [1000 * rank + 10 * (update // 2) + i for i in range(10)]

    assert trained(twice) == LIKELY
    assert trained(twice, workers=1) is None
    assert trained(twice, workers=3) is None
    assert trained(lambda r, u: [1000 * r + 10 * u + i for i in range(10)]) is None
    assert trained(lambda r, u: [7, 8]) is None
    assert trained(twice, style="map") is None


def test_the_same_state_restored_on_all_ranks():
    restored = {"kind": "restored", "state": 5, "at": "load.py:4"}
    drawn = went_in(0, **DROPS, **ONE_STATE)
    assert strength("rng_restored_from_rank0", restored, drawn) == PROVEN
    assert strength("rng_not_decorrelated", restored, drawn) is None
    own = went_in(0, **DROPS)
    assert strength("rng_restored_from_rank0", restored, own) is None
    assert strength("rng_restored_from_rank0", lambda r: restored | {"state": r}, drawn) is None


# Schedules and gradients between updates.


def schedule(steps, **fields):
    usual = {
        "kind": "schedule",
        "optimizer": 0,
        "class": "LambdaLR",
        "at": "train.py:30",
        "per_update": [[steps, 9]],
        "steps": 9 * steps,
        "total": None,
        "zero_from": None,
        "updates": 10,
    }
    return usual | fields


@pytest.mark.parametrize(
    ("passes", "steps", "cause", "other", "sure"),
    [
        (1, 2, "scheduler_steps_times_world", "scheduler_steps_per_micro_batch", PROVEN),
        (3, 3, "scheduler_steps_per_micro_batch", "scheduler_steps_times_world", PROVEN),
        # As many micro-batches as ranks: it may be either.
        (2, 2, "scheduler_steps_per_micro_batch", "scheduler_steps_times_world", LIKELY),
    ],
)
def test_a_schedule_that_runs_ahead(passes, steps, cause, other, sure):
    windows = [window(update, backwards=passes) for update in range(4)]
    assert strength(cause, *windows, schedule(steps, zero_from=5)) == sure
    assert strength(cause, *windows, schedule(steps, total=9)) == sure
    # A warm-up is over long before the run is.
    assert strength(cause, *windows, schedule(steps, total=9) | {"class": "LinearLR"}) == FACT
    # Written in as many steps.
    assert strength(cause, *windows, schedule(steps, total=9 * steps)) == FACT
    assert strength(cause, *windows, schedule(1, zero_from=5)) is None
    assert strength(cause, *windows, schedule(5, zero_from=5)) is None
    assert strength(other, *windows, schedule(steps, zero_from=5)) is None
    # Once an epoch of two updates.
    assert strength(cause, *windows, schedule(0, per_update=[[0, 5], [steps, 4]])) is None


def states(*each, name="gradients of optimizer 0", **fields):
    return [window(update, **{name: list(states), **fields}) for update, states in enumerate(each)]


def test_gradients_that_nobody_clears():
    cause = "gradients_not_cleared"
    kept = [("none",), *[("kept",)] * 4]
    assert strength(cause, *states(*kept)) == PROVEN
    assert strength(cause, *states(*[("none",)] * 5)) is None
    assert strength(cause, *states(*[("touched",)] * 5)) is None
    # Accumulation: cleared before the first of two.
    assert strength(cause, *states(*[("none", "kept")] * 5, backwards=2)) is None
    # Cleared at the beginning of an epoch only.
    assert strength(cause, *states(("none",), *[("kept",), ("kept",), ("none",)] * 3)) == PROVEN
    # A generator's backward goes through the discriminator, whose gradients are cleared later.
    assert strength(cause, *states(*[("kept", "none")] * 5, backwards=2)) is None


def test_gradients_wiped_between_micro_batches():
    cause = "grads_wiped_between_microbatches"
    wiped = [("none", "none", "none")] * 4

    def thirds(_):
        return [mean(4.0, 1 / 3, [("Div", 3.0)])] * 3

    windows = [
        window(u, thirds, backwards=3, **{"gradients of optimizer 0": list(s)})
        for u, s in enumerate(wiped)
    ]
    assert strength(cause, *windows) == LIKELY
    assert strength(cause, *states(*wiped, backwards=3, forwards_without_sync=2)) == LIKELY
    # Two losses of their own, such as for a probe of the gradient.
    assert strength(cause, *states(*wiped, backwards=3)) is None
    kept = [("none", "kept", "kept")] * 4
    assert strength(cause, *states(*kept, backwards=3, forwards_without_sync=2)) is None
    # Two passes around a point; whole gradients of sharded parameters.
    for other in ("used", "elsewhere"):
        held = [("none", other, other)] * 4
        assert strength(cause, *states(*held, backwards=3, forwards_without_sync=2)) is None


# Clips.


def clip(norm, at_update, bound=1.0, **fields):
    one = {"kind": "norm", "sharded": False, "scale": None, "at": "train.py:5", "bound": bound}
    event = {"kind": "clip", "optimizer": 0, "update": 0, "norm": at_update, "shards": None}

    def of(rank):
        each = {k: v(rank) if callable(v) else v for k, v in fields.items()}
        own = {k: each.pop(k) for k in ("sharded", "scale", "backwards") if k in each}
        seen = norm(rank) if callable(norm) else norm
        update = at_update(rank) if callable(at_update) else at_update
        return event | {"norm": update, "clips": [one | {"norm": seen} | own]} | each

    return of


def test_norms_before_the_average():
    cause = "clip_before_average"
    assert strength(cause, clip(lambda r: 2.0 + r, 0.7)) == PROVEN
    assert strength(cause, clip(2.0, 1.0)) is None
    # It cuts nothing; parts of a model, each with a norm of its own; a sharded norm, not reduced.
    assert strength(cause, clip(lambda r: 0.2 + r / 10, 0.3)) is None
    assert strength(cause, clip(lambda r: 2.0 + r, lambda r: 1.0 + r)) is None
    assert strength(cause, clip(lambda r: 2.0 + r, 0.7, sharded=True)) is None
    assert strength(cause, clip(lambda r: 2.0 + r, 0.7, shards="DTensor")) is None


def test_clips_of_scaled_gradients():
    cause = "clip_before_unscale"
    assert strength(cause, clip(3e4, 1.0, scale=65536.0)) == PROVEN
    assert strength(cause, clip(3.0, 1.0)) is None
    assert strength(cause, clip(3.0, 1.0, scale=1.0)) is None
    # The bound was multiplied by the scale as well.
    assert strength(cause, clip(3e4, 1.0, bound=65536.0, scale=65536.0)) is None


def test_clips_of_gradients_that_were_used_already():
    def late(backwards=0, norm=3.0, updates=4, **fields):
        clips = [clip(norm, norm, backwards=backwards)(0) | {"update": u} for u in range(updates)]
        windows = [window(u, **fields) for u in range(updates)]
        return strength("clip_after_step", *clips, *windows)

    assert late() == PROVEN
    assert late(backwards=1) is None
    # A look at the norm; too few; another optimizer's update may have come before.
    assert late(norm=0.5) is None
    assert late(updates=2) is None
    assert late(optimizer=lambda rank: 1) is None


def test_norms_of_shards():
    cause = "clip_norm_of_shards"
    assert strength(cause, clip(lambda r: 2.0 + r, None, shards="FSDP1")) == PROVEN
    assert strength(cause, clip(2.0, None, shards="FSDP1")) is None
    assert strength(cause, clip(lambda r: 2.0 + r, None, shards="DTensor", sharded=True)) is None


# Normalisation.


def uneven(cause, terms, rows=4, updates=4, **fields):
    windows = [window(u, terms, rows=rows, **fields) for u in range(updates)]
    return strength(cause, went_in(0), *windows)


def test_means_over_unequal_counts():
    def tokens(rank):
        return [mean(40.0 + 20 * rank)]

    def labels(rank):
        return [mean(4.0 - 2 * rank)]

    def unequal(rank):
        return [mean(8.0 + 4 * rank, name="MseLoss")]

    def sizes(rank):
        return [2 + rank]

    assert uneven("token_count_local", tokens, rows=[4]) == LIKELY
    assert uneven("valid_count_mean", labels, rows=[4]) == LIKELY
    assert uneven("unequal_batches_equal_weight", unequal, rows=sizes) == LIKELY
    others = {
        "token_count_local": (labels, [4]),
        "valid_count_mean": (tokens, [4]),
        "unequal_batches_equal_weight": (tokens, [4]),
    }
    for cause, (terms, rows) in others.items():
        assert uneven(cause, terms, rows=rows) is None
        assert uneven(cause, lambda _: [mean(40.0)], rows=[4]) is None
        # Summed, and divided by the count of all ranks: each token weighs the same.
        assert uneven(cause, lambda r: [total(40.0 + 20 * r, 0.02)], rows=[4]) is None
        # Weighted by the share of the rank.
        assert uneven(cause, lambda r: [mean(8.0 + 4 * r, 0.8 + 0.4 * r)], rows=sizes) is None
        # Nearly equal, as with the last batch; none of them averaged by torch.
        assert uneven(cause, lambda r: [mean(40.0 + r)], rows=[4]) is None
        windows = [window(u, tokens, rows=[4]) for u in range(4)]
        assert strength(cause, went_in(0, averages=None), *windows) is None
    # What a communication hook makes of the gradients is not known; without one it is LIKELY.
    windows = [window(u, tokens, rows=[4]) for u in range(4)]
    assert strength("token_count_local", went_in(0), *windows) == LIKELY
    assert strength("token_count_local", went_in(0, hooks=1), *windows) is None


def test_the_last_batch_alone_is_no_alarm():
    windows = [window(u, lambda _: [mean(40.0)], rows=[4]) for u in range(5)]
    last = window(5, lambda r: [mean(10.0 + 30 * r)], rows=[4])
    assert strength("token_count_local", went_in(0), *windows, last) is None


def accumulated(cause, counts, factor, passes=None, updates=4):
    def terms(_):
        return [mean(count, factor) for count in counts]

    return strength(
        cause, *(window(u, terms, backwards=passes or len(counts)) for u in range(updates))
    )


def test_micro_batches_with_unequal_counts():
    cause = "accumulation_normalisation"
    assert accumulated(cause, (40.0, 10.0), 0.5) == LIKELY
    assert accumulated(cause, (40.0, 40.0), 0.5) is None
    assert accumulated(cause, (40.0,), 1.0) is None
    # A discriminator's losses on true and false samples: two terms, with equal counts.
    assert accumulated(cause, (8.0, 8.0), 1.0) is None

    def summed(_):
        return [total(40.0, 0.02), total(10.0, 0.02)]

    assert strength(cause, *(window(u, summed, backwards=2) for u in range(4))) is None


def test_a_short_window_divided_by_the_full_number():
    cause = "accumulation_tail_window"

    def of(passes, divisor):
        return lambda _: [mean(8.0, 1 / divisor)] * passes

    full = [window(u, of(4, 4), backwards=4) for u in range(3)]
    assert strength(cause, *full, window(3, of(2, 4), backwards=2)) == LIKELY
    assert strength(cause, *full, window(3, of(2, 2), backwards=2)) is None
    assert strength(cause, *full) is None


def scaled(cause, by, factor, *more, count=8.0, world=2, terms=None):
    """A loss with factors; `by` names them from the loss inwards."""
    averages = {"averages": list(range(world))}
    made = terms or [mean(count, factor, by)]
    windows = []
    for update in range(4):
        event = window(update, losses=[0.6])(0) | {"loss_terms": [made]}
        windows.append(event)
    return strength(cause, went_in(0, **averages), *windows, *more, ranks=world)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_mean_times_the_number_of_ranks(world):
    cause, times = "loss_scaled_by_world", [("Mul", float(world))]
    assert scaled(cause, times, float(world), world=world) == LIKELY
    assert scaled(cause, [*times, ("Mul", 5.0)], 5.0 * world, world=world) == LIKELY
    assert scaled(cause, [], 1.0, world=world) is None
    # A factor of one of two terms is its weight.
    two = [mean(8.0, float(world), times), mean(8.0)]
    assert scaled(cause, times, 0.0, world=world, terms=two) is None
    # Weighted by the rank's share: world * size / total.
    share = [("Div", 8.0 * world), *times, ("Mul", 8.0)]
    assert scaled(cause, share, 1.0, world=world) is None
    # Summed, and divided by the tokens of all ranks.
    tokens = [total(8.0, 1 / 8, [("Div", 8.0 * world), *times])]
    assert scaled(cause, share, 1.0, world=world, terms=tokens) is None
    # Taken back by the learning rate.
    rate = {"kind": "rate", "optimizer": 0, "made_with": 0.1, "lr": 0.1 / world}
    assert scaled(cause, times, float(world), rate, world=world) == FACT


@pytest.mark.parametrize(("count", "given"), [(16.0, FACT), (8.0, LIKELY)])
def test_a_factor_of_a_loss_over_what_was_gathered_may_be_right(count, given):
    """Scores are gathered for the log as well, and the loss is over a rank's own rows then."""
    terms = [mean(count, 2.0, [("Mul", 2.0)])]
    windows = [window(u, lambda _: terms, losses=[0.6], rows=[8]) for u in range(4)]
    gathers = [{"kind": "gathered", "step": update, "at": "train.py:7"} for update in range(4)]
    assert strength("loss_scaled_by_world", went_in(0), *windows, *gathers) == given
    assert strength("loss_scaled_by_world", went_in(0), *windows) == LIKELY


@pytest.mark.parametrize("world", [2, 3])
def test_a_mean_over_the_number_of_ranks(world):
    cause, over = "loss_divided_by_world", [("Div", float(world))]
    shown = {"kind": "reduced", "mine": [0.5], "all": [0.6 * world], "at": "train.py:8"}
    assert scaled(cause, over, 1 / world, shown, world=world) == LIKELY
    # On two ranks it may be a half.
    assert scaled(cause, over, 1 / world, world=world) == (FACT if world == 2 else LIKELY)
    assert scaled(cause, [("Mul", 1 / world)], 1 / world, world=world) is None
    parts = [mean(8.0, 1 / world, over)] * world
    assert scaled(cause, over, 0.0, world=world, terms=parts) is None


def test_accumulation_over_as_many_micro_batches_as_ranks_is_no_division_by_them():
    def halves(_):
        return [mean(8.0, 0.5, [("Div", 2.0)])] * 2

    windows = [window(u, halves, backwards=2) for u in range(4)]
    assert strength("loss_divided_by_world", went_in(0), *windows) is None


# Ownership and resume.


def owned(**fields):
    usual = {
        "kind": "ownership",
        "optimizer": 0,
        "update": 0,
        "held": 4,
        "stray": 0,
        "orphans": 0,
        "some_orphans": [],
        "broken_ties": [],
    }
    return usual | fields


def test_parameters_that_are_nobodys():
    orphans = {"orphans": 2, "some_orphans": [["2.weight", [4, 2]], ["2.bias", [2]]]}
    assert strength("stale_optimizer", owned(stray=2, **orphans)) == PROVEN
    # Prompts, one for each task, in front of a model whose gradients nobody uses.
    assert strength("stale_optimizer", owned(stray=2, free=1, **orphans)) is None
    # An unused parameter of the optimizer; a part that is left out of it.
    assert strength("stale_optimizer", owned(stray=2)) is None
    assert strength("stale_optimizer", owned(**orphans)) is None
    assert strength("params_in_no_optimizer", owned(**orphans)) == FACT
    assert strength("params_in_no_optimizer", owned(stray=2, **orphans)) is None


def test_a_copy_that_some_ranks_write():
    def copy(update, digests, **fields):
        usual = {"kind": "copy", "step": update, "number": 0, "update": update, "class": "Net"}
        usual |= {"calls": update, "names": ["0.weight", "0.bias"]} if not update else {}
        usual |= {"calls": update}

        def of(rank):
            own = {"digests": digests(rank) if callable(digests) else digests}
            return usual | own | {k: v(rank) if callable(v) else v for k, v in fields.items()}

        return of

    def diagnosed(*events):
        return catalogue()["copied_weights_differ"].diagnose(evidence(*events, ranks=3))

    def apart(rank):
        return [7, 8 + (rank == 2)]

    said = diagnosed(copy(0, [7, 8]), copy(1, [9, 8]), copy(2, apart))
    assert (said.strength, said.step, said.ranks, said.tensor) == (LIKELY, 2, (2,), "0.bias")
    # Never equal; called on some ranks only; not the same tensors as before; one rank lacks it.
    assert diagnosed(copy(0, apart), copy(1, apart)) is None
    assert diagnosed(copy(0, [7, 8]), copy(2, apart, calls=lambda rank: int(rank != 1))) is None
    assert diagnosed(copy(0, [7, 8]), copy(2, apart, names=["1.weight", "1.bias"])) is None
    lacks = copy(2, apart)
    assert diagnosed(copy(0, [7, 8]), lambda rank: lacks(rank) if rank else None) is None
    assert diagnosed(copy(0, [7, 8]), copy(1, [7, 9]), copy(2, [5, 5])) is None
    # Beside an optimizer of slices it is the gather that was left out.
    given = replace(evidence(copy(0, [7, 8]), copy(2, apart), ranks=3), parts={0: ["own"]})
    named = {name for name, one in catalogue().items() if one.diagnose(given) is not None}
    assert named == {"sharded_update_not_gathered"}
    assert not catalogue()["sharded_update_not_gathered"].diagnose(replace(given, parts={}))


def test_copies_that_the_script_writes_back_are_trained():
    orphans = {"orphans": 2, "some_orphans": [["2.weight", [4, 2]], ["2.bias", [2]]]}
    first = owned(written=0, **orphans)
    assert strength("params_in_no_optimizer", first, owned(update=2, written=1, **orphans)) == FACT
    assert strength("params_in_no_optimizer", first, owned(update=2, written=2, **orphans)) is None
    assert strength("params_in_no_optimizer", first, owned(update=2, written=0)) == FACT


def test_two_optimizers_with_the_parameters_of_one_model():
    fields = {
        "optimizer": 1,
        "orphans": 4,
        "some_orphans": [["0.weight", [4, 2]]],
        "all_held_by": [0],
        "models_in_none": 1,
    }
    cause = "optimizer_of_another_model"
    in_turn = [{**window(u)(0), "step": u + 1, "optimizer": u % 2} for u in range(4)]
    assert strength(cause, owned(**fields), *in_turn) == LIKELY
    # The other one has stopped: this one was made anew.
    before = [{**window(u)(0), "step": 0} for u in range(4)]
    assert strength(cause, owned(**fields), *before) is None
    # A part that is left out; a model of its own.
    assert strength(cause, owned(**fields | {"models_in_none": 0}), *in_turn) is None
    assert strength(cause, owned(**fields | {"all_held_by": []}), *in_turn) is None


def test_a_broken_tie_and_a_frozen_layer_that_moves():
    assert strength("tie_broken", owned(broken_ties=[["embed", "head"]])) == LIKELY
    assert strength("tie_broken", owned(stray=1)) is None
    frozen = {"kind": "frozen", "moved": ["backbone.1"], "count": 1}
    assert strength("frozen_module_changes", frozen) == LIKELY
    assert strength("frozen_module_changes") is None


def test_a_schedule_that_went_nowhere():
    usual = {"kind": "schedule_not_resumed", "optimizer": 1, "class": "OneCycleLR", "steps": 16}
    event = usual | {"model_loaded_at": "train.py:3"}
    assert strength("scheduler_state_lost", event) == LIKELY
    assert strength("scheduler_state_lost", {"kind": "resumed"}) is None
    one = catalogue()["scheduler_state_lost"].diagnose(evidence(lambda r: event if r else None))
    assert one.ranks == (1,)


def test_a_state_that_went_nowhere():
    lost = {
        "kind": "not_resumed",
        "optimizer": 1,
        "class": "Adam",
        "entries": 4,
        "model_loaded_at": "load.py:3",
    }
    cause = "optimizer_state_lost"
    assert strength(cause, lost) == LIKELY
    assert strength(cause, lost | {"loaded_into_another": "Adam"}) == PROVEN
    assert strength(cause, {"kind": "resumed", "optimizer": 1, "class": "Adam"}) is None
    on_one = catalogue()[cause].diagnose(evidence(lambda r: lost if r else None, {"kind": "x"}))
    assert (on_one.strength, on_one.ranks, on_one.explains) == (PROVEN, (1,), True)


def test_a_single_number_after_an_evaluation_with_unequal_counts_is_a_fact():
    single = {"kind": "reduced", "mine": [0.25], "all": [0.75], "at": "eval.py:3"}

    def after(reduced, **fields):
        return strength("mean_of_means", handed_out(**(EVALUATED | fields)), reduced)

    assert after(single, count=lambda rank: 13 - rank) == FACT
    assert after(single) is None
    both = single | {"mine": [3.0, 13.0], "all": [7.0, 25.0]}
    assert after(both, count=lambda rank: 13 - rank) is None


def test_nothing_is_found_where_nothing_was_written():
    for name, cause in catalogue().items():
        assert cause.diagnose(evidence()) is None, name
        assert cause.diagnose(evidence(ranks=0)) is None, name
        assert cause.diagnose(evidence(ranks=1)) is None, name
