"""What is shown around a divergence: the spreading damage, and what each rank did."""

from __future__ import annotations

from harness.watch.answers.damage import spread, tree
from harness.watch.answers.per_rank import per_rank
from harness.watch.divergence import Difference, Divergence
from harness.watch.evidence import Evidence
from harness.watch.layout import GRADIENTS, PARAMETERS, START, Entry, place_of

NAMES = ("stem.weight", "stem.bias", "head.weight")


def look(changed, *, ranks=3, steps=5, gone=(), in_parts=False):
    """Return what was written, where `changed` holds (step, phase, name, rank)."""

    def seen(index):
        step, phase = place_of(index)
        if step >= steps:
            return {}
        kind = "gradient" if phase == GRADIENTS else "parameter"
        entries = tuple(
            Entry(name=n, kind=kind, shape=(2,), dtype="float32", parts=4 * in_parts) for n in NAMES
        )
        return {
            rank: (entries, tuple(9 + ((step, phase, n, rank) in changed) for n in NAMES))
            for rank in range(ranks)
            if (step, rank) not in gone
        }

    return seen


def found(step, phase):
    first = Difference(name=NAMES[2], kind="gradient", groups=((0, 2), (1,)))
    return Divergence(step=step, phase=phase, differences=(first,), compared=3, ranks=(0, 1, 2))


def test_damage_is_marked_where_and_as_it_is():
    changed = {
        (2, GRADIENTS, "head.weight", 1),
        (2, PARAMETERS, "head.weight", 1),
        (3, GRADIENTS, "stem.bias", 1),
        (3, PARAMETERS, "head.weight", 1),
    }
    damage = spread(look(changed), found(2, GRADIENTS), last=4)
    assert damage is not None
    assert damage.steps == (0, 1, 2, 3, 4)
    assert damage.tensors == {
        "stem.weight": ("", "", "", "", ""),
        "stem.bias": ("", "", "", "g", ""),
        "head.weight": ("", "", "gp", "p", ""),
    }
    assert damage.ranks == {
        0: ("", "", "", "", ""),
        1: ("", "", "odd", "odd", ""),
        2: ("", "", "", "", ""),
    }


def test_what_a_rank_never_reached_is_not_called_equal():
    changed = {(1, PARAMETERS, "stem.bias", 1)}
    damage = spread(look(changed, gone={(3, 2)}), found(1, PARAMETERS), last=3)
    assert damage is not None
    assert damage.tensors["stem.bias"] == ("", "p", "", "?")
    assert damage.ranks[2] == ("", "", "", "?")
    assert damage.ranks[0] == ("", "", "", "")


def test_what_is_read_in_parts_is_not_called_equal_again():
    first = PARAMETERS, "head.weight", 1
    damage = spread(
        look({(10, *first), (14, *first)}, steps=18, in_parts=True), found(10, PARAMETERS), last=17
    )
    assert damage is not None
    marks = dict(zip(damage.steps, damage.tensors["head.weight"], strict=True))
    # All of it is read after update 16.
    assert marks == dict.fromkeys((8, 9), "") | {10: "p", 14: "p", 16: ""} | dict.fromkeys(
        (11, 12, 13, 15, 17), "?"
    )


def test_a_divergence_before_the_first_update_is_in_its_column():
    damage = spread(look(()), found(0, START), last=1)
    assert damage is not None
    assert damage.tensors["head.weight"] == ("p", "")


def test_the_tree_names_each_module_once():
    changed = {(2, GRADIENTS, "head.weight", 1), (2, PARAMETERS, "head.weight", 1)}
    damage = spread(look(changed), found(2, GRADIENTS), last=3)
    assert damage is not None
    head, *rows = tree(damage)[:-1]
    assert head.split() == ["0", "1", "2", "3", "update"]
    assert [row.split() for row in rows] == [
        ["stem"],
        ["weight", "·", "·", "·", "·"],
        ["bias", "·", "·", "·", "·"],
        ["head"],
        ["weight", "·", "·", "#", "·"],
    ]


def window(update, **more):
    return {"kind": "update", "step": update, "optimizer": 0, "update": update, **more}


def test_ranks_stand_side_by_side_and_the_bad_update_is_marked():
    journals = {
        0: [window(u, forwards=1, losses=[1.5 - u]) for u in range(4)],
        1: [window(0, forwards=1), window(2, forwards=1, forwards_past_wrapper=2, losses=[0.25])],
    }
    table = per_rank(Evidence(world_size=2, ranks=(0, 1), journals=journals), optimizer=0, update=2)
    assert table is not None
    assert table.titles == ("", "update", "rank", "loss", "forwards", "past DDP")
    assert [row for row in table.rows if row[0]] == [
        ("->", "2", "0", "-0.5", "1", "-"),
        ("->", "2", "1", "0.25", "1", "2"),
    ]
    # A window that was not written again is as the one before: its counts hold, its values not.
    assert table.rows[1] == ("", "1", "1", "-", "1", "-")
    assert per_rank(Evidence(world_size=2, ranks=(), journals={}), optimizer=0, update=2) is None


def test_parts_that_are_each_ranks_own_are_no_damage():
    own = {(0, START, "stem.bias", 1), (0, GRADIENTS, "stem.bias", 1)}
    own |= {(step, phase, "stem.bias", 1) for step in range(4) for phase in (GRADIENTS, PARAMETERS)}
    damage = spread(look(own | {(2, PARAMETERS, "head.weight", 1)}), found(2, PARAMETERS), last=3)
    assert damage is not None
    assert set(damage.tensors) == {"stem.weight", "head.weight"}
    assert damage.ranks[1] == ("", "", "odd", "")
