"""Runs that hang or lose a rank: the call without a partner, on real ranks and on made-up ones."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.causes import Strength, diagnose
from harness.watch.evidence import Evidence
from harness.watch.hangs.pairing import (
    EXTRA,
    MISSING,
    ORDER,
    PARTED,
    SKIPPED,
    Call,
    Calls,
    Frame,
    first_unpaired,
)
from harness.watch.hangs.reading import (
    loops_apart,
    loops_left,
    loops_of,
    rank_guard,
    same_branching,
)
from harness.watch.hangs.stopping import is_stuck
from tests.watching import ROOT, environment, torchrun

WAYS = ROOT / "tests/watched/hangs/ways.py"


def line(of, text, nth=0):
    """The number of the line with a text, in the function of a name."""
    lines = WAYS.read_text().splitlines()
    start = next(i for i, one in enumerate(lines) if one.startswith(f"def {of}("))
    return [i + 1 for i, one in enumerate(lines) if i > start and text in one][nth]


BACKWARD = line("update", "backward()")
# case: cause, ranks, where, and what else the first sentence has to name
PARTED_WAYS = {
    "stop_decision_local": ({1}, line("stop_decision_local", "if score"), {BACKWARD}),
    "uneven_inputs": ({1}, line("uneven_inputs", "# ends"), {BACKWARD}),
    "rank0_only_collective": ({0}, line("rank0_only_collective", "# only"), {BACKWARD}),
    "rank0_saves": ({0}, line("rank0_saves", "# only"), {BACKWARD}),
    "step_skipped_on_one_rank": (
        {1},
        line("step_skipped_on_one_rank", "loss.backward()"),
        {line("step_skipped_on_one_rank", "loss.backward()")},
    ),
    "collective_order_differs": (
        {1},
        line("reduce_loss", "all_reduce"),
        {line("reduce_loss", "all_reduce"), line("reduce_accuracy", "all_reduce")},
    ),
    "collective_mismatch": (
        {1},
        line("collective_mismatch", "all_reduce"),
        {line("collective_mismatch", "all_reduce")},
    ),
}
CAUSES = {"rank0_saves": "rank0_only_collective"}
GOES_ON = {"rank0_only_collective", "collective_order_differs", "collective_mismatch"}
"""Ways that end without anybody waiting: the fault is found, nothing has stopped."""
FIXED = [way for way in PARTED_WAYS if way != "rank0_saves"]
NO_OPTIMIZER = {"collective_order_differs", "collective_mismatch"}


CRASHES = {
    "buffer_written_before_backward": line("buffer_written_before_backward", "# raises"),
    "static_graph_no_sync": line("static_graph_no_sync", "# raises"),
    "ready_twice": BACKWARD,
}
"""Ways in which all ranks raise alike, and the line in which they do."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    out = tmp_path_factory.mktemp("hangs")
    cases = {way: {"way": way} for way in PARTED_WAYS}
    cases |= {way: {"way": way} for way in CRASHES}
    cases |= {f"{way}-fixed": {"way": way, "fixed": True} for way in (*FIXED, *CRASHES)}
    (out / "cases.json").write_text(json.dumps(cases))
    ended = torchrun(
        "-m", "tests.watched.hangs.driver", out, out / "cases.json", ranks=3, seconds=300
    )
    assert ended.returncode == 0, ended.stderr
    return {case: json.loads((out / f"{case}.json").read_text())["answer"] for case in cases}


@pytest.mark.parametrize("way", PARTED_WAYS)
def test_the_cause_is_named_with_ranks_and_both_lines(answers, way):
    ranks, where, named = PARTED_WAYS[way]
    answer = answers[way]
    best = answer["diagnoses"][0]
    assert best["cause"] == CAUSES.get(way, way)
    assert set(best["ranks"]) == ranks
    assert best["where"] == f"{WAYS}:{where}"
    assert best["strength"] in ("likely", "proven")
    lines = {int(n) for n in re.findall(r"ways\.py:(\d+)", " ".join(best["because"]))}
    assert lines >= named
    assert answer["exit_code"] == (20 if way in GOES_ON else 21)


@pytest.mark.parametrize("way", CRASHES)
def test_an_error_that_all_ranks_raise_has_its_cause(answers, way):
    best = answers[way]["diagnoses"][0]
    assert best["cause"] == way
    assert best["where"] == f"{WAYS}:{CRASHES[way]}"
    assert answers[way]["exit_code"] == 21


@pytest.mark.parametrize("way", [*FIXED, *CRASHES])
def test_the_right_way_is_silent(answers, way):
    answer = answers[f"{way}-fixed"]
    assert answer["exit_code"] == (22 if way in NO_OPTIMIZER else 0)
    assert [d["cause"] for d in answer["diagnoses"] if d["strength"] != "fact"] == []


def watched(*words, ranks, options=()):
    return torchrun("-m", "harness.watch", *options, WAYS, *words, ranks=ranks)


def said(ended):
    return [
        text.removeprefix("crossrank: ")
        for text in ended.stderr.splitlines()
        if text.startswith("crossrank: ")
    ]


def kept(ended) -> Path:
    return Path(re.search(r"^  kept     (.*)/watch.html$", ended.stderr, re.M)[1])


def test_a_run_that_is_stuck_is_ended_after_the_time_that_was_typed():
    ended = watched("operation_mismatch", ranks=2, options=("--hang-timeout", "2"))
    assert "exitcode  : 21 (pid" in ended.stderr
    (first,) = said(ended)
    broadcast = line("operation_mismatch", "dist.broadcast")
    reduce = line("operation_mismatch", "dist.all_reduce", 1)
    assert f"broadcast 2 of 4 float32 at {WAYS}:{broadcast}" in first
    assert f"all_reduce 2 of 4 float32 at {WAYS}:{reduce}" in first
    assert "cause: collective_mismatch" in first
    answer = json.loads((kept(ended) / "watch.json").read_text())
    assert answer["exit_code"] == 21


def test_a_rank_that_gloo_aborts_has_left_word_of_its_last_call(tmp_path):
    ended = watched("shape_mismatch", ranks=2, options=("--json", tmp_path / "answer.json"))
    assert "Signal 6 (SIGABRT)" in ended.stderr
    # What was asked for is written, though no rank has lived to do it.
    (first,) = said(ended)
    assert json.loads((tmp_path / "answer.json").read_text())["headline"] == first
    where = line("shape_mismatch", "dist.all_reduce")
    assert first.startswith(f"rank 1: called all_reduce of 2 float32 at {WAYS}:{where}")
    assert "paired with all_reduce of 4096 float32" in first
    assert "cause: collective_mismatch" in first


def test_of_a_killed_rank_the_others_keep_what_there_is():
    ended = watched("killed", "--odd", "0", ranks=3)
    assert "Signal 9 (SIGKILL)" in ended.stderr
    (first,) = said(ended)
    assert first.startswith("rank 0: the process was gone, without an exception")
    assert f"cause: rank_killed at {WAYS}:{BACKWARD}" in first
    folder = kept(ended)
    for rank in range(3):
        assert (folder / f"rank{rank}.journal.jsonl").stat().st_size > 0
        assert json.loads((folder / f"rank{rank}.last_call").read_bytes().partition(b"\n")[0])


def test_a_rank_that_raises_is_told_from_those_that_feel_it():
    ended = watched("raises", ranks=3)
    assert "exitcode  : 1 (pid" in ended.stderr
    (first,) = said(ended)
    where = line("raises", "raise KeyError")
    assert first.startswith("rank 1: raised KeyError: 'labels'")
    assert f"cause: rank_raised at {WAYS}:{where}" in first


def test_a_script_that_ends_without_python_s_own_exit_was_not_killed():
    ended = watched("exits_by_itself", ranks=2)
    assert ended.returncode == 0
    assert said(ended) == []


def alone(**variables):
    command = [sys.executable, "-m", "harness.watch", "tests/watched/hangs/meets.py"]
    env = environment() | {name: str(value) for name, value in variables.items()}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_what_keeps_a_process_group_from_coming_about():
    here = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as taken:
        # Torch listens on all addresses of both kinds.
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        runs = {
            "rank_not_in_environment": alone(),
            "peer_unreachable": alone(**here, MASTER_PORT=free_port()),
            "port_taken": alone(**here, MASTER_PORT=taken.getsockname()[1]),
        }
    texts = set()
    for cause, ended in runs.items():
        (first,) = said(ended)
        assert f"cause: {cause} at tests/watched/hangs/meets.py:7" in first, first
        assert ended.returncode == 1
        texts.add(first.rpartition("fix: ")[2])
    assert len(texts) == 3
    assert "the environment has no RANK" in said(runs["rank_not_in_environment"])[0]
    assert "only 1 of 2 ranks" in said(runs["peer_unreachable"])[0]


def test_a_time_that_is_none_is_a_mistake_in_typing():
    command = [sys.executable, "-m", "harness.watch", "--hang-timeout", "0", str(WAYS)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 2
    assert "type seconds, such as 60" in ended.stderr


def test_a_torch_without_a_recorder_is_watched_all_the_same(monkeypatch):
    import torch

    from harness.watch.hangs.collectives import Collectives

    c10d = torch._C._distributed_c10d
    assert Collectives().known
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):  # A build for CUDA has both.
        monkeypatch.setattr(c10d, name, lambda: b"", raising=False)
    other = Collectives()
    assert not other.known
    assert (other.waits(), other.to_json()["calls"]) == (None, [])


# What follows is made up: calls as `operation@line`, with a size where it matters.


OPERATIONS = {"r": "all_reduce", "b": "broadcast", "w": "barrier", "a": "all_to_all"}


def calls(words, *, first=1, group="0", members=(), waits=False, path="train.py"):
    made = []
    for number, word in enumerate(words.split(), start=first):
        operation, _, rest = word.partition("@")
        at, _, size = rest.partition("x")
        made.append(
            Call(
                group=group,
                number=number,
                operation=OPERATIONS[operation],
                shapes=((int(size or 4),),),
                dtypes=("float32",),
                # Line 0 stands for a thread of the backend, where no line is known.
                via=(Frame(path, int(at), "main"),) if int(at) else (),
                time=float(number),
            )
        )
    return Calls(groups={group: tuple(members)} if members else {}, made={group: tuple(made)})


def unpaired(*sides, **kwargs):
    return first_unpaired({rank: calls(side, **kwargs) for rank, side in enumerate(sides)})


SAME = "b@1 r@2 b@1 r@2"


@pytest.mark.parametrize(
    ("sides", "kind", "number", "odd", "count"),
    [
        ((SAME, SAME, "b@1 r@2"), MISSING, 3, (2,), 2),
        ((SAME, SAME, "b@1 r@2 b@1"), MISSING, 4, (2,), 1),
        (("b@1 r@2 b@9 b@1 r@2", SAME, SAME), EXTRA, 3, (0,), 1),
        ((SAME + " b@1 r@2", SAME + " b@1 r@2", "b@1 r@2 b@1 b@1 r@2"), SKIPPED, 4, (2,), 1),
        ((SAME + " r@5 r@6", SAME + " r@5 r@6", SAME + " r@6 r@5"), ORDER, 5, (2,), 2),
        ((SAME + " r@5", SAME + " r@5", SAME + " w@6"), PARTED, 5, (2,), 1),
        ((SAME + " r@5x8", SAME + " r@5", SAME + " r@5"), PARTED, 5, (0,), 1),
    ],
)
def test_the_first_call_that_does_not_fit(sides, kind, number, odd, count):
    found = unpaired(*sides)
    assert (found.kind, found.number, found.odd, found.count) == (kind, number, odd, count)


@pytest.mark.parametrize(
    "sides",
    [
        (SAME, SAME, SAME),
        # One line for the rank that sends and one for those that receive.
        ("b@1 r@3 b@1 r@3", "b@2 r@3 b@2 r@3", "b@2 r@3 b@2 r@3"),
        # Each in turn.
        ("b@1 b@2 b@2", "b@2 b@1 b@2", "b@2 b@2 b@1"),
    ],
)
def test_calls_that_fit(sides):
    assert unpaired(*sides) is None


def test_calls_whose_line_is_not_known_on_one_rank_are_the_same_calls():
    assert unpaired("b@1 r@2x9 r@2x7 b@1 r@2x9", "b@1 r@2x9 r@0x7 b@1 r@2x9") is None
    # Of two messages of the same size, now this rank's second has no line and now that one's.
    assert unpaired("r@2x9 r@2x9 r@2x9 r@0x9", "r@2x9 r@0x9 r@2x9 r@2x9") is None
    assert unpaired("b@1 r@2x9 r@2x9 b@1", "b@1 r@0x9 r@2x9 b@1") is None
    # Another size is another call, known line or not.
    assert unpaired("b@1 r@2x9 b@1", "b@1 r@0x8 b@1").kind == "parted"


def test_what_the_recorder_has_overwritten_is_not_missing():
    records = {0: calls("r@2 r@2 r@2", first=8), 1: calls("r@2 r@2", first=9)}
    assert first_unpaired(records) is None
    records = {0: calls("r@2 r@2 r@2", first=8), 1: calls("r@2", first=9)}
    assert first_unpaired(records).number == 10


def test_a_rank_of_another_group_is_not_missed():
    records = {
        0: calls("r@2", group="1", members=(0, 1)),
        1: calls("r@2", group="1", members=(0, 1)),
        2: calls("", group="0"),
    }
    assert first_unpaired(records) is None
    # And one that belongs to it is.
    records[2] = calls("r@2", group="0", members=(0, 1, 2))
    for rank in (0, 1):
        records[rank] = Calls(groups={"0": (0, 1, 2)}, made={"0": ()})
    assert first_unpaired(records).odd == (0, 1)


def stall(**about):
    usual = {"waiting": False, "still": False, "stack": [], "idle": 5.0, "time": 0.0}
    return usual | {"updates": 0, "since_update": {}} | about


@pytest.mark.parametrize(
    ("stalls", "ends", "stuck"),
    [
        ({0: stall(waiting=True), 1: stall()}, {}, False),
        ({0: stall(waiting=True), 1: stall(still=True)}, {}, True),
        ({0: stall(waiting=True), 1: stall(waiting=True)}, {}, True),
        ({0: stall(waiting=True)}, {1: {"code": 0}}, True),
        # Nothing is known of rank 1: it may be on another host.
        ({0: stall(waiting=True)}, {}, False),
        ({0: stall(), 1: stall(still=True)}, {}, False),
    ],
)
def test_a_rank_that_goes_on_may_still_come(stalls, ends, stuck):
    evidence = Evidence(world_size=2, ranks=(0, 1), journals={}, stalls=stalls, ends=ends)
    assert is_stuck(evidence) is stuck


def stuck(*sides, path="train.py", gone=True):
    """What is left of ranks that made these calls; the last one is through, or is not."""
    records = {rank: calls(side, path=path) for rank, side in enumerate(sides)}
    last = len(sides) - 1
    return Evidence(
        world_size=len(sides),
        ranks=tuple(records),
        journals={rank: () for rank in records},
        stalls={rank: stall(waiting=True) for rank in records if rank != last},
        ends={last: {"code": 0}} if gone else {},
        calls=records,
        unpaired=first_unpaired(records),
    )


def diagnosed(evidence):
    return {one.cause: one for one in diagnose(evidence) if one.strength > Strength.FACT}


@pytest.mark.parametrize(
    ("sides", "gone", "named"),
    [
        (("a@2 a@2 a@2", "a@2 a@2 a@2", "a@2 a@2"), True, True),
        # It may still come.
        (("a@2 a@2 a@2", "a@2 a@2 a@2", "a@2 a@2"), False, False),
        # It never made this one: nobody knows that it was to.
        (("a@2 a@2 a@2", "a@2 a@2 a@2", "a@3 a@3"), True, False),
        # Any other collective is as often as the loop is gone through.
        (("r@2 r@2 r@2", "r@2 r@2 r@2", "r@2 r@2"), True, False),
    ],
)
def test_exchanges_that_a_rank_makes_less_often_than_others(sides, gone, named):
    found = diagnosed(stuck(*sides, gone=gone)).get("moe_all_to_all_hang")
    assert (found is not None) is named
    if found is not None:
        assert (found.strength, found.ranks, found.where) == (Strength.LIKELY, (2,), "train.py:2")
        assert "3 on rank 0, 3 on rank 1, 2 on rank 2" in found.because[0].replace("times", "")


@pytest.mark.parametrize(("before", "named"), [("r@2 r@2", True), ("r@3 r@3", False)])
def test_a_loop_that_is_over_has_made_its_calls_in_the_rounds_before(tmp_path, before, named):
    path = tmp_path / "train.py"
    path.write_text("for batch in shards[rank]:\n    step(batch)\nsave()\n")
    sides = ("r@2 r@2 r@2", "r@2 r@2 r@2", before)
    assert ("uneven_inputs" in diagnosed(stuck(*sides, path=str(path)))) is named


SCRIPT = """\
for epoch in range(9):
    for batch in loader:
        if bad(batch):
            continue
        step(batch)
    if rank == 0:
        save()
    else:
        wait()
    if score < best:
        break
done()
"""


ABORTED = """\
for epoch in range(9):
    prepare(reduced)
    for batch in loader:
        loss.backward()
        if score < best:
            break
    report(reduced)
    for batch in own:
        loss.backward()
"""


def aborted(call_at, backward_at, *, updates=5, count=1, dead=0, wrapped=True, path="train.py"):
    """What is left where rank 0 was in a call of its own and rank 1 in a backward pass."""
    call = {"operation": "all_reduce", "shapes": [[]], "elements": 1, "dtype": "int64", "count": 2}
    backward = {"operation": "backward", "shapes": [], "elements": 0, "dtype": "", "count": count}
    wraps = ({"kind": "wrap", "module": 0, "step": 0},) if wrapped else ()
    return Evidence(
        world_size=2,
        ranks=(0, 1),
        journals={0: wraps, 1: wraps},
        gone={dead: {"time": 3.0, "pid": 77}},
        last_calls={
            0: call | {"at": f"{path}:{call_at}", "updates": 5},
            1: backward | {"at": f"{path}:{backward_at}", "updates": updates},
        },
    )


@pytest.mark.parametrize(
    ("call_at", "backward_at", "cause", "where"),
    [
        (7, 4, "stop_decision_local", 5),
        (2, 9, "uneven_inputs", 8),
        # In the loop as well: one line of it or the other.
        (5, 4, "collective_mismatch", 5),
    ],
)
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_gloo_ended_was_out_of_the_loop(
    tmp_path, call_at, backward_at, cause, where, dead
):
    path = tmp_path / "train.py"
    path.write_text(ABORTED)
    found = diagnosed(aborted(call_at, backward_at, dead=dead, path=path))
    assert list(found) == [cause]
    assert (found[cause].ranks, found[cause].where) == ((0,), f"{path}:{where}")
    assert found[cause].strength == Strength.LIKELY


def test_a_rank_that_is_gone_was_killed_where_the_others_may_just_be_late():
    # In the same update as the call, or after as many calls; nobody reduces in backward.
    for usual in ({"updates": 4}, {"count": 2}, {"wrapped": False}):
        assert list(diagnosed(aborted(7, 4, **usual))) == ["rank_killed"]
    assert list(diagnosed(aborted(7, 4))) == ["collective_mismatch"]


def test_the_source_says_which_loop_was_left_and_how(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    outer, inner = loops_left(str(path), inside=5, outside=12)
    assert (outer.line, outer.left_by, outer.counted, outer.continued_by) == (1, 10, True, None)
    assert (inner.line, inner.left_by, inner.counted, inner.continued_by) == (2, None, False, 3)
    assert [loop.line for loop in loops_left(str(path), inside=5, outside=7)] == [2]
    # Before the inner loop, in the next round of the outer one; before both it was never in them.
    (path.parent / "next.py").write_text(ABORTED)
    after = loops_apart(str(path.parent / "next.py"), inside=4, outside=2)
    assert [(loop.line, loop.left_by) for loop in after] == [(3, 5)]
    path.write_text("start()\n" + SCRIPT)
    assert loops_apart(str(path), inside=6, outside=1) == []
    path.write_text(SCRIPT)
    assert loops_left(str(path), inside=7, outside=9) == []
    assert loops_of(str(path), 12) == []
    assert rank_guard(str(path), 7) == "rank == 0"
    assert rank_guard(str(path), 5) is None
    assert same_branching(str(path), 7, 9)
    assert not same_branching(str(path), 5, 7)


def test_source_that_cannot_be_read_says_nothing(tmp_path):
    (tmp_path / "broken.py").write_text("def (:")
    for path in (tmp_path / "broken.py", tmp_path / "missing.py", Path("<stdin>")):
        assert loops_of(str(path), 1) == []
        assert rank_guard(str(path), 1) is None
