"""One all-to-all for each chunk of tokens that a rank has: routing decides how many there are.

A rank sends its tokens to the experts chunk by chunk, and stops when none are left. By then ranks
have sent different numbers of chunks. One that is through goes on, and the first chunk of its next
step meets the last one of a slower rank: the calls fit, and experts are given tokens of two steps.
In the end somebody waits, in a step that is not to blame. Reported in deepspeedai/DeepSpeed#5794.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted, unknown
from scenarios._models import split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/moe_all_to_all_hang.yaml."""

    steps: int = field(metadata=at_least(2))
    tokens: int = field(metadata=at_least(2))
    experts: int = field(metadata=at_least(2))
    chunk: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    hang_timeout_s: float = field(metadata=at_least(0.1))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train experts on the tokens sent to them; how many exchanges there are is what differs."""
    import torch
    import torch.distributed as dist

    from harness.waiting import gives_up
    from scenarios._models import FEATURES, rows
    from scenarios._tensor_parallel import everywhere, exchanged

    world = rank.world_size
    drawn = torch.randn(p.experts, FEATURES, generator=rank.generator("experts")).double()
    mine = torch.nn.Parameter(drawn.chunk(world)[rank.rank].to(rank.device, copy=True))
    optimizer = torch.optim.SGD([mine], lr=p.lr)
    with gives_up(rank, arm, p.hang_timeout_s):
        for step in range(p.steps):
            x, y = rows(rank, p.tokens, name=f"tokens {step}", whole=True)
            # Texts come sorted by subject, and one expert has the lower half of the subjects.
            expert = torch.where(x[:, 0] < 0, 0, (x[:, 0] * 1000).long() % p.experts)
            share = x[:, 0].argsort().chunk(world)[rank.rank].sort().values
            sent, expert = torch.cat([x, y, expert[:, None]], dim=1)[share], expert[share]
            waiting = [sent[expert // len(mine) == peer] for peer in range(world)]
            size = p.tokens if arm["count"] == "one" else p.chunk
            chunks = torch.tensor(max(-(-len(tokens) // size) for tokens in waiting))
            rank.log(step=step, phase="begins", chunks=int(chunks))
            if arm["count"] != "own":
                dist.all_reduce(chunks, op=dist.ReduceOp.MAX)
            parts = [slice(number * size, (number + 1) * size) for number in range(int(chunks))]
            received = [exchanged([tokens[part] for tokens in waiting]) for part in parts]
            tokens, targets, owner = torch.cat(received).split([FEATURES, 1, 1], dim=1)
            output = (tokens * mine[owner[:, 0].long() % len(mine)]).sum(dim=1, keepdim=True)
            optimizer.zero_grad()
            ((output - targets) ** 2).sum().div(p.tokens).backward()
            optimizer.step()
            rank.log(step=step, received=len(tokens))
            if not arm.isolated:
                rank.snapshot(step=step, experts=everywhere(mine))


def chunks_of(t: Tables) -> list[list[int]]:
    """Return, by rank, how many chunks it had in each step that it began."""
    t.require("own")
    return [[*t.series("own", "chunks", phase="begins", rank=r).values()] for r in t.ranks("own")]


@symptom(HOLDS, source="deepspeedai/DeepSpeed#5794")
def waits(t: Tables) -> Finding:
    """A rank with more chunks than the others waits in an exchange until the timeout."""
    chunks = chunks_of(t)
    raised = [t.value("own", "raised", step=0, phase="gave up", rank=r) for r in t.ranks("own")]
    stuck = [rank for rank, error in enumerate(raised) if error]
    if len(set(map(sum, chunks))) == 1:
        return unknown("all ranks had as many chunks; type another seed or scenario.chunk=1")
    reason = f"ranks {stuck or 'none'} wait in vain; chunks by rank and step are {chunks}"
    return (holds if stuck else refuted)(reason, effect=float(len(stuck)), unit="ranks that wait")


@symptom(REFUTED)
def hangs_at_once(t: Tables) -> Finding:
    """It hangs in the first step in which the numbers of chunks differ."""
    chunks = chunks_of(t)
    last = min(map(len, chunks)) - 1
    apart = [n for n in range(last + 1) if len({of_rank[n] for of_rank in chunks}) > 1]
    if not apart or apart[0] == t.root_params["steps"] - 1:
        return unknown("chunks differ in number in no step before the last; type another seed")
    reason = f"chunks first differ in step {apart[0]}; every rank comes as far as step {last}"
    return (refuted if last > apart[0] else holds)(reason)


@mechanism(HOLDS)
def steps_are_mixed(t: Tables) -> Finding:
    """Until then experts are given tokens of two steps at once."""
    chunks = set(map(tuple, chunks_of(t)))
    got = [t.series("own", "received", rank=r) for r in t.ranks("own")]
    totals = [sum(series[step] for series in got) for step in range(min(map(len, got)))]
    odd = [total for total in totals if total != t.root_params["tokens"]]
    reason = f"{t.root_params['tokens']} tokens are sent in each step, received are {totals}"
    verdict = holds if odd else unknown if len(chunks) > 1 else refuted
    return verdict(reason, effect=float(len(odd)), unit="steps")


@remedy(HOLDS, source="deepspeedai/DeepSpeed#5794")
def agree_first(t: Tables) -> Finding:
    """With the largest number of chunks agreed on first, experts train like in one process."""
    return like_one_process(t, "agreed", "experts")


@remedy(HOLDS)
def one_exchange(t: Tables) -> Finding:
    """With one exchange for all tokens they do, too."""
    return like_one_process(t, "one_exchange", "experts")


SCENARIO = Scenario(
    title="An all-to-all for each chunk of tokens that a rank has: the numbers differ",
    family="hangs",
    cause="moe_all_to_all_hang",
    params=Params,
    run=run,
    check=split_equally("tokens", "experts"),
    headline=says(
        waits=("ranks with more chunks of tokens wait for ever", "nobody waits"),
        hangs_at_once=("in the step in which they differ", "not before the end"),
        steps_are_mixed=("until then steps are mixed", "no steps are mixed"),
        agree_first=("agreeing on a number helps", "agreeing on a number does not help"),
    ),
    arms=(
        one_process("one process, all experts", count="agreed"),
        faulty("own", "as many as a rank has", count="own", isolated=True),
        fixed("agreed", "the largest number on any rank", count="agreed"),
        fixed("one_exchange", "all tokens at once", count="one"),
    ),
    claims=(waits, hangs_at_once, steps_are_mixed, agree_first, one_exchange),
)
