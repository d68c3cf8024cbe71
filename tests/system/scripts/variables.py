"""A loop that counts, averages and collects in variables of many kinds, which nobody was told of."""

import argparse
import copy
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resile.training

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=0.0, help="of each iteration")
args = parser.parse_args()


class Meter:
    """An average."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.values: list[float] = []

    def add(self, value: float) -> None:
        """Count a value."""
        self.sum += value
        self.values.append(value)


resile.training.seed()
x = torch.randn(200, 8)
y = (x[:, 0] > 0).long()
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
average = copy.deepcopy(model)
meter = Meter()
count = 0
recent: deque[int] = deque(maxlen=3)
seen: set[int] = set()
best: dict[str, Any] = {"loss": 1e9, "weight": None}
turns = np.zeros(3)


def train_epoch(loader: Any, epoch: int) -> float:
    """Train for an epoch; return the sum of its losses."""
    global count
    total, names = torch.zeros(()), []
    for number, (inputs, targets) in enumerate(loader):
        for group in optimizer.param_groups:
            group["weight_decay"] = 1e-4 * count
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(new, 0.1)
        total += loss.detach()
        count += 1
        meter.add(loss.item())
        recent.append(number)
        seen.add(number)
        names.append(f"{epoch}.{number}")
        turns[number % 3] += 1
        if loss.item() < best["loss"]:
            best.update(loss=loss.item(), weight=model.weight.detach().clone())
        sums = [total.item(), meter.sum, best["loss"], best["weight"].sum().item(), average.weight.sum().item()]
        print(
            f"batch {count - 1}: {' '.join(f'{each:.6f}' for each in sums)} {len(meter.values)} {list(recent)} "
            f"{sorted(seen)} {names} {turns.tolist()} {optimizer.param_groups[0]['lr']:.6f}",
            flush=True,
        )
        time.sleep(args.seconds)
    return total.item()


def main() -> None:
    """Train for three epochs."""
    global model, optimizer
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
    model, optimizer, loader, schedule = resile.training.prepare(
        model, optimizer, loader, scheduler, body="batch", num_shards=4, checkpoint_every=7
    )
    history: list[float] = []
    begun = [0]
    for epoch in loader.epochs(3):
        begun[0] += 1
        schedule.step()  # at the start: a worker that joins within the epoch does it again, without effect
        history.append(round(train_epoch(loader, epoch), 6))
        print(f"after epoch {epoch}: {begun[0]} {history}", flush=True)


main()
