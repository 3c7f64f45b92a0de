"""No wrapper at all: parameters are broadcast at the start and gradients averaged in one buffer."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F


def broadcast_parameters(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def average_gradients(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for g in grads:
        g.copy_(flat[offset : offset + g.numel()].view_as(g))
        offset += g.numel()


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRU(3, 10, batch_first=True)
        self.out = torch.nn.Linear(10, 3)

    def forward(self, x):
        return self.out(self.cell(x)[0])


def train(args):
    rank, size = dist.get_rank(), dist.get_world_size()
    # Every rank begins with weights of its own; those of rank 0 are what counts.
    torch.manual_seed(args.seed + rank)
    model = Recurrent()
    broadcast_parameters(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)

    generator = torch.Generator().manual_seed(args.seed)
    series = torch.randn(96, 7, 3, generator=generator).cumsum(1) * 0.3
    for step in range(args.steps):
        batch = series[step * 12 : step * 12 + 12][rank::size]
        loss = F.mse_loss(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        model = train(args)
        dist.destroy_process_group()
    else:
        model = train(args)
    return model, {}


if __name__ == "__main__":
    main()
