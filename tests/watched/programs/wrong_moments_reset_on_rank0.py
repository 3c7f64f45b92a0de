"""Language model on characters; the rank that sees the loss rise starts Adam's moments anew."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CAUSE = "optimizer_state_differs"
# The moments are cleared after update 9, and the next one is made without them on that rank.
EXPECTED = {
    "step": 10,
    "phase": "parameters",
    "tensor": (
        "table.weight",
        "mix.weight_ih_l0",
        "mix.weight_hh_l0",
        "mix.bias_ih_l0",
        "mix.bias_hh_l0",
        "head.weight",
        "head.bias",
    ),
    "odd_ranks": (0,),
}
TEXT = "ranks that were equal once stay equal only if each of them does the same to its state. "


class Characters(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.table = nn.Embedding(letters, 12)
        self.mix = nn.GRU(12, 16, batch_first=True)
        self.head = nn.Linear(16, letters)

    def forward(self, x):
        return self.head(self.mix(self.table(x))[0])


def rows(generator, text, count, length=8):
    starts = torch.randint(len(text) - length - 1, (count,), generator=generator)
    pieces = torch.stack([text[i : i + length + 1] for i in starts])
    return pieces[:, :-1], pieces[:, 1:]


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=12)
    args = parser.parse_args(argv)
    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    letters = sorted(set(TEXT))
    text = torch.tensor([letters.index(c) for c in TEXT])
    model = DistributedDataParallel(Characters(len(letters)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    for update in range(args.updates):
        x, y = (part[rank::world] for part in rows(generator, text, 24))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update == 9 and (rank == 0 or args.fixed):
            # "It went up, so the moments are stale." Only the rank that logs looks at it.
            optimizer.state.clear()
            if rank == 0:
                print(f"update {update}: loss {loss.item():.3f}, moments cleared")

    if own_group:
        dist.destroy_process_group()
    return model, {}


if __name__ == "__main__":
    main()
