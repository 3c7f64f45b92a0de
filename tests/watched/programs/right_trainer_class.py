"""A Trainer class in the way of the DDP tutorials: snapshots, and going on from the newest one."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, length=96):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.rand(length, 4, generator=generator) * 6.0
        self.y = torch.sin(self.x).sum(dim=1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Trainer:
    def __init__(self, model, dataset, optimizer, snapshot_path, batch_size, seed):
        self.rank = dist.get_rank()
        self.sampler = DistributedSampler(dataset, shuffle=True, seed=seed)
        per_rank = batch_size // dist.get_world_size()
        self.loader = DataLoader(dataset, per_rank, sampler=self.sampler, drop_last=True)
        self.optimizer = optimizer
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self.raw = model
        if os.path.exists(snapshot_path):  # noqa: PTH110
            self._load_snapshot()
        self.model = DistributedDataParallel(model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, weights_only=True)
        self.raw.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]

    def _save_snapshot(self):
        if self.rank == 0:
            snapshot = {
                "model": self.raw.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "epochs_run": self.epochs_run,
            }
            torch.save(snapshot, self.snapshot_path)
        dist.barrier()

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.smooth_l1_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self, max_epochs):
        while self.epochs_run < max_epochs:
            self.sampler.set_epoch(self.epochs_run)
            losses = [self._run_batch(source, targets) for source, targets in self.loader]
            self.epochs_run += 1
            self._save_snapshot()
            print(f"[rank {self.rank}] epoch {self.epochs_run} loss {losses[-1]:.4f}")


def load_train_objs(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    model.append(nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def main(argv=None):
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    started_here = not dist.is_initialized()
    if started_here:
        dist.init_process_group(backend="gloo")

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "snapshot.pt")  # noqa: PTH118
    # Interrupted after the first epoch, and started again.
    for epochs in (1, args.total_epochs):
        model, optimizer = load_train_objs(args.seed)
        trainer = Trainer(model, Waves(), optimizer, path, args.batch_size, args.seed)
        trainer.train(epochs)
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(path)  # noqa: PTH107
        os.rmdir(folder[0])  # noqa: PTH106
    if started_here:
        dist.destroy_process_group()
    return trainer.model, {}


if __name__ == "__main__":
    main()
