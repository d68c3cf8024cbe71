"""A loop with much in its body that would be something else in a part of a batch, and where two models train."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seconds", type=float, default=0.0, help="of each iteration, for a test to kill workers")
parser.add_argument("--fast-once", type=Path, help="a file: where it exists, iterations take no time")
args = parser.parse_args()


def pause() -> None:
    """Take half the time of an iteration."""
    if not (args.fast_once and args.fast_once.exists()):
        time.sleep(args.seconds / 2)


resile.training.seed()
x = torch.randn(389, 8)
y = (x[:, 0] > 0.8).long()
critic = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 10))
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
first = torch.optim.AdamW(critic.parameters(), lr=3e-3)
second = torch.optim.Adam(maker.parameters(), lr=3e-3)
models, optimizers, loader = resile.training.prepare(
    [critic, maker],
    [first, second],
    DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True),
    body="batch",
    num_shards=8,
    checkpoint_every=4,
)
for _epoch in loader.epochs(args.epochs):
    for inputs, targets in loader:
        number, total = loader.iteration, loader.iterations_total
        for group in first.param_groups:
            group["lr"] = 3e-3 * (1 - number / total)
        outputs = critic(inputs)
        logits, embedded = outputs[:, :2], F.normalize(outputs[:, 2:], dim=1)
        loss = F.cross_entropy(logits, targets, weight=torch.tensor([1.0, 9.0]))
        loss = loss + 0.1 * F.cross_entropy(embedded @ embedded.T / 0.1, torch.arange(len(logits)))
        ((loss + 1e-3 * (logits**2).sum()) / 3).backward()
        pause()
        if number % 3 == 2:  # it accumulates over three batches
            nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            first.step()
            first.zero_grad()
        second.zero_grad()
        made = maker(torch.randn(len(inputs), 4))
        critic.requires_grad_(False)
        F.mse_loss(critic(made).mean(0), logits.new_ones(10)).backward()
        critic.requires_grad_(True)
        second.step()
        pause()
        print(f"{number} {loss.item():.6f} {torch.rand(()).item():.6f}", flush=True)
