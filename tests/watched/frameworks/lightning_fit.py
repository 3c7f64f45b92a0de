"""A Lightning script as people write it; `--fault` breaks it. Importable, so that it is spawned."""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FAULTS = ("none", "edit", "data", "lr", "norm")
"""The last one is none."""
STEPS = 6
BAD_STEP = 3


class Classifier(lightning.LightningModule):
    def __init__(self, fault="none"):
        super().__init__()
        self.fault = fault
        norm = nn.BatchNorm1d(16) if fault == "norm" else nn.GELU()
        self.net = nn.Sequential(nn.Linear(8, 16), norm, nn.Linear(16, 2))

    def training_step(self, batch, number):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        self.log("validation", F.cross_entropy(self.net(x), y), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, number):
        # The updates are counted from 1 here.
        bad = self.fault == "edit" and self.global_rank == 1
        if bad and self.trainer.global_step == BAD_STEP + 1:
            with torch.no_grad():
                self.net[2].weight[1, 2] += 1e-3

    def configure_optimizers(self):
        lr = 0.05 * (2 if self.fault == "lr" and self.global_rank == 1 else 1)
        optimizer = torch.optim.AdamW(self.parameters(), lr=lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(out: Path, fault="none", *, loggers=None, callbacks=(), strategy="ddp"):
    """Train for two epochs; return the model."""
    lightning.seed_everything(0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(72, 8, generator=generator), torch.randint(0, 2, (72,), generator=generator)
    model = Classifier(fault)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=loggers or [CSVLogger(out, name="csv", version=0)],
        callbacks=[*callbacks, ModelCheckpoint(out / "saved", save_last=True)],
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        use_distributed_sampler=fault != "data",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=8, shuffle=True)
    trainer.fit(model, train, DataLoader(TensorDataset(x[48:], y[48:]), batch_size=4))
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--callback", action="store_true")
    parser.add_argument("--wandb", action="store_true")
    args = parser.parse_args()
    loggers, callbacks = [CSVLogger(args.out, name="csv", version=0)], []
    if args.wandb:
        from lightning.pytorch.loggers import WandbLogger

        loggers.append(WandbLogger(name="watched", save_dir=args.out, offline=True))
    if args.callback:
        from harness.watch.lightning import WatchCallback

        callbacks.append(WatchCallback())
    fit(args.out, args.fault, loggers=loggers, callbacks=callbacks, strategy=args.strategy)
    print("fitted")


if __name__ == "__main__":
    main()
