"""All that makes equal bits hard: BatchNorm, dropout, augmentation, a schedule, clipping, a leftover sample."""

import argparse
import random

import numpy as np
import torch
from torch import Tensor, nn

from resile.training import ElasticModel, seed

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--mode", default="same-bits")
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--num-shards", type=int, default=12)
parser.add_argument("--device", default="cpu")
parser.add_argument("--convolutions", action="store_true")
parser.add_argument("--batch-range", type=int, nargs=2)
args = parser.parse_args()

BATCH, BATCHES = 48, 20


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.x = torch.randn(size, 16, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(16) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return self.x[index] + noise, self.y[index]


seed(0)
front = [nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()]
widths = (64, 64) if args.convolutions else (16, 64)
layers = [*(front if args.convolutions else []), nn.Linear(*widths)]
model = nn.Sequential(*layers, nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2)).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ElasticModel(
    model,
    lambda: (Noisy(BATCH * BATCHES + 1), Noisy(100)),
    nn.functional.cross_entropy,
    optimizer,
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * BATCHES),
    metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()},
    autocast=torch.bfloat16 if args.bf16 else None,
    num_workers=args.num_workers,
).train(
    epochs=args.epochs,
    batch_size=BATCH,
    num_shards=args.num_shards,
    seed=args.seed,
    clip_grad_norm=1.0,
    checkpoint_every=20,
    mode=args.mode,
    batch_range=tuple(args.batch_range) if args.batch_range else None,
)
