"""Parameters that are not where the user believes: in no optimizer, in no module, in two copies."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence
from harness.watch.journal import Event


@cause(
    family="ownership",
    sees="The loss stands still, or a part of the model does; no error comes.",
    why="The optimizer holds tensors that the model no longer has: fully_shard, a conversion or a "
    "new layer has replaced them. Their gradients stay None, and step passes over them.",
    confirm="Count the parameters of the model that are in optimizer.param_groups, by id.",
    change="make the optimizer after everything that replaces parameters",
    fix="""
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)       # after it
""",
    reported=("huggingface/accelerate#2665",),
)
def stale_optimizer(evidence: Evidence) -> Diagnosis | None:
    """Recognise parameters with gradients in no optimizer, and an optimizer of others without."""
    for event in evidence.events("ownership"):
        if event["stray"] and event["orphans"] and not event.get("free"):
            names = ", ".join(name for name, _ in event["some_orphans"])
            return Diagnosis(
                strength=Strength.PROVEN,
                because=(
                    f"{event['stray']} of the {event['held']} parameters of optimizer "
                    f"{event['optimizer']} have no gradient and are in no module that trains; "
                    f"{event['orphans']} parameters that have one are in no optimizer: {names}",
                ),
                step=event["update"],
                tensor=event["some_orphans"][0][0],
                explains=False,
            )
    return None


@cause(
    family="ownership",
    sees="A part of the model is not trained.",
    why="Its parameters get gradients and were given to no optimizer.",
    confirm="Print the names of the parameters that are in no optimizer.param_groups.",
    change="give them to the optimizer, or set requires_grad=False if they are to stay",
    fix="""
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
""",
)
def params_in_no_optimizer(evidence: Evidence) -> Diagnosis | None:
    """Note parameters with gradients that nobody updates: often wanted, so a fact."""
    for event in evidence.events("ownership"):
        if event["orphans"] and not event["stray"] and not _by_hand(evidence, event):
            names = ", ".join(name for name, _ in event["some_orphans"])
            return Diagnosis(
                strength=Strength.FACT,
                because=(
                    f"{event['orphans']} parameters have gradients and are in no optimizer: "
                    f"{names}",
                ),
                step=event["update"],
                explains=False,
            )
    return None


def _by_hand(evidence: Evidence, event: Event) -> bool:
    """Say whether the script writes to all of them itself, as with copies that are optimized."""
    return any(
        later["optimizer"] == event["optimizer"] and later.get("written") == later["orphans"] > 0
        for later in evidence.events("ownership", event["rank"])
    )


@cause(
    family="ownership",
    sees="One of two models does not learn; the other one learns too fast. No error comes.",
    why="Both optimizers were given the parameters of the same model: it gets two updates, and the "
    "other one none.",
    confirm="Count the parameters of each model that are in each optimizer's param_groups, by id.",
    change="give each optimizer the parameters of its own model",
    fix="""
optimizer_g = torch.optim.Adam(generator.parameters(), lr=lr)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=lr)      # not the generator's
""",
)
def optimizer_of_another_model(evidence: Evidence) -> Diagnosis | None:
    """Recognise two optimizers at work on the same parameters, beside a model that is in none."""
    for event in evidence.events("ownership"):
        shared = event.get("all_held_by", [])
        windows = [u for u in evidence.updates(event["rank"]) if u["step"] > event["step"]]
        # One that was made anew, with the old one still there, takes turns with nobody.
        if not event.get("models_in_none") or not any(u["optimizer"] in shared for u in windows):
            continue
        names = ", ".join(name for name, _ in event["some_orphans"])
        return Diagnosis(
            strength=Strength.LIKELY,
            because=(
                f"all {event['held']} parameters of optimizer {event['optimizer']} are in "
                f"optimizer {shared[0]} too, and {event['orphans']} with a gradient are in none: "
                f"{names}",
            ),
            step=event["update"],
            tensor=event["some_orphans"][0][0],
            explains=False,
        )
    return None


@cause(
    family="ownership",
    sees="A model with tied weights has more parameters than it should, and trains worse.",
    why="The embedding and the output layer were tied, and something copied one of them: each "
    "gets half of the gradient and goes its own way.",
    confirm="Compare the data_ptr of both weights.",
    change="tie the weights again after wrapping, moving or loading",
    fix="""
model.lm_head.weight = model.embed.weight          # after to_empty, deepcopy, sharding
""",
    reported=("facebookresearch/lingua#75", "pytorch/torchtune#616"),
)
def tie_broken(evidence: Evidence) -> Diagnosis | None:
    """Recognise an embedding and an output layer that begin with the same values in two places."""
    for event in evidence.events("ownership"):
        for table, layer in event["broken_ties"]:
            return Diagnosis(
                strength=Strength.LIKELY,
                because=(
                    f"{table}.weight and {layer}.weight have the same values before update "
                    f"{event['update']}, in two places of memory",
                ),
                step=event["update"],
                tensor=f"{layer}.weight",
                explains=False,
            )
    return None


@cause(
    family="ownership",
    sees="A frozen backbone gives other features after fine-tuning.",
    why="requires_grad=False stops the weights, not the running statistics: batch norm updates "
    "them in every forward pass in training mode.",
    confirm="Compare running_mean of the frozen layers before and after an epoch.",
    change="keep the frozen part in eval mode: call eval() on it after each model.train()",
    fix="""
model.train()
model.backbone.eval()              # after each train(), which switches all parts
""",
    reported=("pytorch/pytorch#86590", "lightly-ai/lightly#1438"),
)
def frozen_module_changes(evidence: Evidence) -> Diagnosis | None:
    """Recognise running statistics that move below parameters that do not."""
    for event in evidence.events("frozen"):
        return Diagnosis(
            strength=Strength.LIKELY,
            because=(
                f"no parameter of {', '.join(event['moved'])} is trained, and its running "
                f"statistics have moved ({event['count']} such layers in training mode)",
            ),
            step=event["step"],
            tensor=f"{event['moved'][0]}.running_mean",
            explains=False,
        )
    return None
