"""A script with the Trainer of Hugging Face as people write it; `--fault` breaks it."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

FAULTS = ("none", "edit", "data", "bypass", "dropout")
STEPS = 6
BAD_STEP = 3


class Classifier(nn.Module):
    def __init__(self, fault):
        super().__init__()
        dropout = [nn.Dropout(0.5)] if fault == "dropout" else []
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), *dropout, nn.Linear(16, 2))
        self.masks = []
        for module in dropout:
            module.register_forward_hook(lambda *seen: self.masks.append((seen[2] == 0).tolist()))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class FaultyTrainer(Trainer):
    fault = "none"

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.fault == "bypass" and self.state.global_step >= BAD_STEP:
            model = self.accelerator.unwrap_model(model)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def get_train_dataloader(self):
        if self.fault == "data":
            return DataLoader(self.train_dataset, 4, shuffle=True, collate_fn=self.data_collator)
        return super().get_train_dataloader()


class Edit(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == BAD_STEP + 1 and args.process_index == 1:
            with torch.no_grad():
                model.net[-1].weight[1, 2] += 1e-3


def train(out: Path, fault="none", *, report_to=(), callbacks=()):
    """Train for two epochs; return the model."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"x": torch.randn(8, generator=generator), "labels": torch.tensor(i % 2)} for i in range(36)
    ]
    arguments = TrainingArguments(
        str(out / "saved"),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=2,
        learning_rate=0.05,
        use_cpu=True,
        report_to=list(report_to),
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=1,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        seed=3,
    )
    torch.manual_seed(3)
    model = Classifier(fault)
    trainer = FaultyTrainer(
        model=model,
        args=arguments,
        train_dataset=rows[:24],
        eval_dataset=rows[24:],
        callbacks=[*callbacks, *([Edit()] if fault == "edit" else [])],
    )
    trainer.fault = fault
    trainer.train()
    return model, trainer.state.log_history


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--callback", action="store_true")
    args = parser.parse_args()
    callbacks = []
    if args.callback:
        from harness.watch.transformers import WatchCallback

        callbacks.append(WatchCallback())
    train(args.out, args.fault, callbacks=callbacks)
    print("trained")


if __name__ == "__main__":
    main()
