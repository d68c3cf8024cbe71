"""Buffers of every rule: a codebook by moving averages (VQ-VAE), a queue of keys (MoCo), counts, extremes, flags.

``--plain FILE`` trains without Resile; ``--write FILE`` stores the model. ``--megabytes`` makes one buffer that large.
"""

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training

CODES, WIDTH, SLOTS, DECAY = 8, 4, 96, 0.9


class Quantizer(nn.Module):
    """Replaces each row by the nearest of the codes, which follow the means of their rows."""

    sizes: Tensor
    sums: Tensor
    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(CODES, WIDTH)
        self.register_buffer("sizes", torch.ones(CODES))
        self.register_buffer("sums", codes.clone())
        self.register_buffer("codes", codes)

    def means(self) -> Tensor:
        total = self.sizes.sum()
        smoothed = (self.sizes + 1e-5) / (total + CODES * 1e-5) * total
        return self.sums / smoothed.unsqueeze(1)

    def forward(self, rows: Tensor) -> Tensor:
        nearest = F.one_hot(torch.cdist(rows.detach(), self.codes).argmin(1), CODES).to(rows.dtype)
        quantized = nearest @ self.codes
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(DECAY).add_(nearest.sum(0), alpha=1 - DECAY)
                self.sums.mul_(DECAY).add_(nearest.T @ rows, alpha=1 - DECAY)
                self.codes.copy_(self.means())
        return rows + (quantized - rows).detach()


class Contrast(nn.Module):
    """Compares rows with keys of earlier batches, and keeps those of this one."""

    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, SLOTS), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, rows: Tensor) -> Tensor:
        queries = F.normalize(self.query(rows), dim=1)
        with torch.no_grad():
            keys = F.normalize(self.key(rows), dim=1)
        similar = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone()], 1)
        if self.training:
            with torch.no_grad():
                places = (int(self.pointer) + torch.arange(len(keys))) % SLOTS
                self.queue[:, places] = keys.T
                self.pointer.copy_((self.pointer + len(keys)) % SLOTS)
        return similar


class Combined(nn.Module):
    seen: Tensor
    largest: Tensor
    smallest: Tensor
    flags: Tensor
    newest: Tensor
    large: Tensor

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.quantizer = Quantizer()
        self.contrast = Contrast()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", torch.full((), -torch.inf))
        self.register_buffer("smallest", torch.full((8,), torch.inf))
        self.register_buffer("flags", torch.zeros(8, dtype=torch.bool))
        self.register_buffer("newest", torch.zeros(8))
        self.register_buffer("large", torch.zeros(megabytes << 18, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += len(inputs)
            self.largest.copy_(torch.maximum(self.largest, inputs.max()))
            self.smallest = torch.minimum(self.smallest, inputs.amin(0))
            self.flags |= (inputs > 2.0).any(0)
            self.newest.copy_(inputs[-1])
            if len(self.large):
                self.large.add_(inputs.square().sum())
        rows = self.first(inputs)
        return self.contrast(self.quantizer(rows))


RULES = {
    "sizes": ("sum", DECAY),
    "sums": ("sum", DECAY),
    "codes": lambda quantizer: quantizer.means(),
    "queue": "concat",
    "pointer": "concat",
    "seen": "sum",
    "largest": "max",
    "smallest": "min",
    "flags": "any",
    "newest": "last",
    "large": "sum",
}

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true")
parser.add_argument("--write")
parser.add_argument("--megabytes", type=int, default=1)
parser.add_argument("--body", default="batch")
parser.add_argument("--num-shards", type=int, default=8)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--undeclared", action="store_true")
args = parser.parse_args()

resile.training.seed(0)
generator = torch.Generator().manual_seed(1)
x = torch.randn(8 * 48 + 40, 8, generator=generator)
model = Combined(args.megabytes)
optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
loader = DataLoader(TensorDataset(x), batch_size=48)
epochs = range(args.epochs)
if not args.plain:
    if not args.undeclared:
        resile.training.buffers(model, **RULES)
    model, optimizer, loader = resile.training.prepare(
        model, optimizer, loader, num_shards=args.num_shards, body=args.body
    )
    epochs = loader.epochs(args.epochs)
for _ in epochs:
    for (inputs,) in loader:
        optimizer.zero_grad()
        similar = model(inputs)
        F.cross_entropy(similar / 0.2, torch.zeros(len(similar), dtype=torch.long)).backward()
        optimizer.step()
        if args.body == "batch":
            with torch.no_grad():
                for key, query in zip(model.contrast.key.parameters(), model.contrast.query.parameters(), strict=True):
                    key.lerp_(query, 0.1)
if args.write and (args.plain or loader.is_lowest_rank):
    torch.save(model.state_dict(), args.write)
