"""Small programs whose updates are audited: `--case` names a recipe, right or wrong."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

ROWS, TOKENS, CLASSES = 12, 6, 7
IGNORED = -100


class Net(nn.Module):
    """Classifies tokens; other cases use parts of it in other ways."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.stem = nn.Linear(5, 16)
        self.norm = nn.Identity()
        if case in ("batch_norm",):
            self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.4 if case == "dropout" else 0.0)
        self.head = nn.Linear(16, CLASSES)
        self.calls = 0

    def body(self, x):
        return self.drop(torch.tanh(self.norm(self.stem(x))))

    def forward(self, x, target=None):
        if self.case == "forward_communicates":
            mean = x.mean()
            dist.all_reduce(mean)
            x = x + mean
        if self.case == "depends_on_the_past":
            self.calls += 1
            x = x * PAST.pop()
        h = (
            checkpoint(self.body, x, use_reentrant=False)
            if self.case == "checkpoint"
            else self.body(x)
        )
        y = self.head(h)
        if self.case == "loss_inside":
            return {"loss": F.cross_entropy(y, target), "logits": y}
        return (y, h) if self.case == "returns_hidden" else y


PAST = []


def data(args, rank, world):
    """Yield, update by update, micro-batches of this rank: inputs and labels of tokens."""
    generator = torch.Generator().manual_seed(args.seed)
    unequal = "unequal" in args.case
    for _ in range(args.steps):
        window = []
        for micro in range(args.accumulate):
            x = torch.randn(ROWS, TOKENS, 5, generator=generator, dtype=torch.float32)
            y = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=generator)
            keep = 1 + torch.arange(ROWS) * TOKENS // ROWS
            if args.case.startswith("accumulation"):
                # All ranks alike, the micro-batches not.
                keep = torch.full((ROWS,), TOKENS - 2 * micro)
            if args.ragged:
                y = y.masked_fill(torch.arange(TOKENS) >= keep[:, None], IGNORED)
            if args.ragged and not args.case.startswith("accumulation"):
                rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
            else:
                rows = slice(rank, None, world)
            if unequal:
                rows = slice(0, 6) if rank == 0 else slice(6 + rank - 1, None, world - 1)
            window.append((x[rows].flatten(0, 1), y[rows].flatten()))
        yield window


def loss_of(case, model, x, y, window, world, tokens):
    if case == "loss_inside":
        return model(x, target=y)["loss"]
    output = model(x)
    if case == "returns_hidden":
        output, hidden = output
        return F.cross_entropy(output, y) + 0.1 * hidden.square().mean()
    if case == "two_losses":
        return F.cross_entropy(output, y) + 0.3 * F.mse_loss(output, torch.zeros_like(output))
    if case == "label_smoothing":
        return F.cross_entropy(output, y, label_smoothing=0.1)
    if case == "half_squared":
        return 0.5 * F.mse_loss(output, torch.zeros_like(output))
    if case == "masked":
        mask = (y != IGNORED).float()
        each = F.cross_entropy(output, y, reduction="none")
        return (each * mask).sum() / mask.sum()
    if case == "masked_by_hand":
        mask = (y != IGNORED).float()
        chosen = output.log_softmax(1).gather(1, y.clamp(min=0)[:, None])[:, 0]
        return -(chosen * mask).sum() / mask.sum()
    if case == "focal":
        each = F.cross_entropy(output, y, reduction="none")
        return ((1 - torch.exp(-each)).square() * each).mean()
    if case == "weighted_rows":
        each = F.cross_entropy(output, y, reduction="none")
        return each @ torch.linspace(0.1, 1.0, len(each))
    if case == "own_loss":
        return -(output.log_softmax(1) * F.one_hot(y.clamp(min=0), CLASSES)).sum(1).logsumexp(0)
    if case in ("global_tokens", "accumulation_global"):
        return F.cross_entropy(output, y, reduction="sum") * world / tokens
    if case == "sum":
        return F.cross_entropy(output, y, reduction="sum")
    if case == "unequal_weighted":
        return F.cross_entropy(output, y) * len(y) * world / (ROWS * TOKENS)
    loss = F.cross_entropy(output, y)
    if case == "scaled":
        loss = loss * world
    if case == "scaled_at_last":
        factor = float(world)
        loss = loss * factor
    if case == "divided":
        dist.all_reduce(loss)
        loss /= world
    if case == "penalty":
        loss = loss + 1e-2 * sum(p.square().sum() for p in model.parameters())
    if case == "gradient_penalty":
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return loss + slope.square().mean()
    if case == "one_rank_weighs_more":
        loss = loss * (1.5 if dist.get_rank() == 0 else 1.0)
    if case == "accumulation_undivided":
        return loss
    return loss / len(window)


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    case = args.case
    PAST[:] = [1.0 + 0.1 * n for n in range(99)]
    net = Net(case)
    by_hand = case.startswith("by_hand")
    model = net if by_hand else DDP(net)
    if case == "compressed":
        model.register_comm_hook(None, fp16_compress_hook)
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=case == "grad_scaler")
    for window in data(args, rank, world):
        if case != "not_cleared":
            optimizer.zero_grad()
        tokens = sum((y != IGNORED).sum() for _, y in window)
        dist.all_reduce(tokens)
        for number, (x, y) in enumerate(window):
            last = number == len(window) - 1
            hold = contextlib.nullcontext() if last or by_hand else model.no_sync()
            with hold, torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
                loss = loss_of(case, model, x, y, window, world, tokens)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if by_hand:
            for p in net.parameters():
                dist.all_reduce(p.grad)
                if case != "by_hand_summed":
                    p.grad /= world
        if case == "divided_again":
            for p in net.parameters():
                p.grad /= world
        if case == "one_layer_scaled":
            net.head.weight.grad *= world
        if case == "wrong_layer":
            net.head.weight.grad += 0.01 * net.head.weight.detach()
        if case == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    return model
