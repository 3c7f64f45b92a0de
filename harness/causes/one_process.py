"""Faults that one process has as well, and that several ranks share without a difference.

Nothing parts and no collective is wrong, so that a replay goes through the same; most of them are
a choice that some correct program makes on purpose, and no rule can tell.
"""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence


@cause(
    family="buffers",
    sees="A model scores otherwise than it did when it was saved, or otherwise on every call; what "
    "comes out for a row depends on the rows beside it.",
    why="It is evaluated in train mode: batch norms use the batch at hand and move their running "
    "statistics, and dropout drops. torch.no_grad() changes neither. F.dropout(x, p) is told "
    "nothing by model.eval(), and a loop over nn.Dropout misses Dropout2d and AlphaDropout.",
    confirm="Evaluate one row alone and among others: in eval mode it gives the same.",
    change="call model.eval() before an evaluation and model.train() behind it",
    fix="""
model.eval()
with torch.no_grad():
    output = model(x)                  # F.dropout(x, p, training=self.training) inside it
model.train()
""",
)
def eval_forgotten(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: statistics are estimated anew, and Monte Carlo dropout is sampled, like that."""
    return None


@cause(
    family="numerics",
    sees="The loss cannot fall below a bound, 1.46 for ten classes, and training hardly moves.",
    why="cross_entropy takes logits, and the log_softmax of them. Given probabilities it takes the "
    "softmax of numbers between 0 and 1, which is never far from uniform.",
    confirm="Print the loss of a row that is certainly right: with logits it is near 0.",
    change="hand logits to cross_entropy",
    fix="""
loss = torch.nn.functional.cross_entropy(logits, labels)          # no softmax before it
loss = torch.nn.functional.nll_loss(probabilities.log(), labels)  # if there are no logits
""",
)
def softmax_twice(evidence: Evidence) -> Diagnosis | None:
    """Note a cross entropy of a softmax's output; somebody may want it so, hence a fact."""
    for rank in evidence.ranks:
        for event in evidence.updates(rank):
            if event.get("softmax_twice"):
                return Diagnosis(
                    strength=Strength.FACT,
                    because=(
                        f"the loss of update {event['step']} is a cross entropy whose input is the "
                        "output of a softmax: it takes the softmax of that once more",
                    ),
                    step=event["step"],
                    explains=False,
                )
    return None


@cause(
    family="resume",
    sees="The best checkpoint, restored, scores like the last one; a buffer never seems to change.",
    why="state_dict() hands out the tensors themselves. Training goes on in place, and what was "
    "kept goes with it; a copy of the dictionary holds the same tensors.",
    confirm="Compare data_ptr() of what was kept with that of the model's parameter.",
    change="copy.deepcopy(model.state_dict()), or save it to a file at once",
    fix="""
best = copy.deepcopy(model.state_dict())
best = {name: value.detach().clone() for name, value in model.state_dict().items()}
""",
)
def state_dict_aliased(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: who hands a state_dict on at once needs no copy, and loads nothing else."""
    return None


@cause(
    family="gradients",
    sees="A class that nobody named is predicted often; or training is slower, the more labels "
    "are to be ignored.",
    why="A cross entropy by hand knows no ignore_index. An index of -100 is the hundredth class "
    "from the end, if there are as many; and where ignored rows are set to zero, a mean over all "
    "rows still counts them.",
    confirm="Compare the loss with F.cross_entropy on the same logits and labels.",
    change="leave the ignored rows out before indexing, and take the mean over the others",
    fix="""
kept = labels != -100
loss = -log_probabilities[kept].gather(1, labels[kept, None]).mean()
""",
)
def ignored_label_indexed(evidence: Evidence) -> Diagnosis | None:
    """Say nothing: an index below 0 counts from the end, which is what others mean by it."""
    return None
