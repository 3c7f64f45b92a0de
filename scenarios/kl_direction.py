"""KLDivLoss has the right direction; what goes wrong is which argument is a logarithm.

KLDivLoss(input, target) is KL(target || exp(input)): with the student's log-probabilities and the
teacher's probabilities it is KL(teacher || student), what distillation wants. An article takes it
for the other direction, takes a negative loss for the proof, and sets log_target=True with the
teacher's probabilities: the student then learns the softmax of those, a far flatter distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, negated, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/kl_direction.yaml."""

    rows: int = field(metadata=at_least(1))
    classes: int = field(metadata=at_least(2))
    steps: int = field(metadata=at_least(20))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Fit a student to a teacher; what is passed to KLDivLoss is what differs."""
    import torch
    from torch.nn.functional import kl_div

    draw = rank.generator("logits")
    both = 2.0 * torch.randn(2, p.rows, p.classes, generator=draw, dtype=torch.float64)
    teacher, start = both.to(rank.device)

    def loss_of(student: torch.Tensor) -> torch.Tensor:
        passed = {
            "default": (student.log_softmax(1), teacher.softmax(1), False),
            "probabilities": (student.softmax(1), teacher.softmax(1), False),
            "reversed": (teacher.log_softmax(1), student.softmax(1), False),
            "log_target_alone": (student.log_softmax(1), teacher.softmax(1), True),
            "log_target": (student.log_softmax(1), teacher.log_softmax(1), True),
        }
        input_, target, is_log = passed[arm["passes"]]
        return kl_div(input_, target, reduction="batchmean", log_target=is_log)

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p.softmax(1) * (p.log_softmax(1) - q.log_softmax(1))).sum(1).mean()

    at_teacher = teacher.clone().requires_grad_()
    loss_of(at_teacher).backward()
    assert at_teacher.grad is not None
    rank.log(step=0, gradient_at_teacher=at_teacher.grad.abs().max(), loss=loss_of(start))
    rank.log(step=0, teacher_student=kl(teacher, start), student_teacher=kl(start, teacher))
    student = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([student], lr=p.lr)
    for _ in range(p.steps):
        optimizer.zero_grad()
        loss_of(student).backward()
        optimizer.step()
    rank.log(step=p.steps, teacher_student=kl(teacher, student.detach()))


def teaches(t: Tables, arm: str) -> Finding:
    """Decide: the loss has no slope where the student is the teacher, so that it can end there."""
    t.require(arm)
    slope, left = t.value(arm, "gradient_at_teacher", step=0), t.last(arm, "teacher_student")
    reason = f"{arm}: at the teacher the gradient is {slope:.2g}; after the fit KL is {left:.2g}"
    return is_rounding(slope, dtype_floor(EPS["float64"]), reason, "largest gradient")


def is_negative(t: Tables, arm: str) -> Finding:
    """Decide: the loss of the arm before the fit is below 0, where no divergence is."""
    t.require(arm)
    loss = t.value(arm, "loss", step=0)
    return (holds if loss < 0.0 else refuted)(f"{arm}: {loss:.4g}", effect=loss, unit="loss")


@mechanism(REFUTED, settles="B74")
def direction_is_reversed(t: Tables) -> Finding:
    """KLDivLoss(student, teacher) computes KL(student || teacher), the wrong way round."""
    t.require("default")
    names = ("loss", "teacher_student", "student_teacher")
    loss, right, wrong = (t.value("default", name, step=0) for name in names)
    said = (
        f"loss {loss:.5g}, KL(teacher || student) {right:.5g}, KL(student || teacher) {wrong:.5g}"
    )
    floor, unit = dtype_floor(EPS["float64"] * t.root_params["classes"]), "share of KL"
    reversed_ = is_rounding(abs(loss / wrong - 1.0), floor, said, unit)
    return all_of(reversed_, negated(is_rounding(abs(loss / right - 1.0), floor, said, unit)))


@symptom(HOLDS, settles="B75")
def negative_without_a_logarithm(t: Tables) -> Finding:
    """The loss is negative where the student is passed as probabilities."""
    return is_negative(t, "probabilities")


@mechanism(REFUTED, settles="B75")
def negative_shows_the_direction(t: Tables) -> Finding:
    """A negative loss shows that the direction is the wrong one."""
    return is_negative(t, "reversed")


@remedy(REFUTED, settles="B76")
def log_target_helps(t: Tables) -> Finding:
    """With log_target=True and the teacher's softmax the student learns the teacher."""
    return teaches(t, "log_target_alone")


@remedy(HOLDS)
def logarithm_where_it_belongs(t: Tables) -> Finding:
    """With a log student, and a log teacher if log_target=True, the student learns the teacher."""
    return all_of(teaches(t, "default"), teaches(t, "log_target"))


SCENARIO = Scenario(
    title="KLDivLoss: not its direction is wrong but which argument is a logarithm",
    family="numerics",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        direction_is_reversed=("KLDivLoss is reversed", "KLDivLoss has the right direction"),
        log_target_helps=("log_target helps", "log_target wants log-probabilities"),
    ),
    arms=(
        reference("default", "log student, teacher", ranks=1, passes="default"),
        faulty("probabilities", "student, teacher", ranks=1, passes="probabilities"),
        faulty("log_target_alone", "log_target=True", ranks=1, passes="log_target_alone"),
        control("reversed", "log teacher, student", ranks=1, passes="reversed"),
        fixed("log_target", "log_target=True, log teacher", ranks=1, passes="log_target"),
    ),
    claims=(
        direction_is_reversed,
        negative_without_a_logarithm,
        negative_shows_the_direction,
        log_target_helps,
        logarithm_where_it_belongs,
    ),
)
