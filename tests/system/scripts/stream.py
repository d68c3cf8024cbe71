"""A stream that does not know its length: each epoch is the next part of one long sequence."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import resile.training

SAMPLES = 288


class Parts(IterableDataset[Any]):
    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.next += 1
            yield torch.randn(4) + self.next / 1000, torch.tensor([self.next % 2.0])
            if self.next % SAMPLES == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


resile.training.seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = resile.training.prepare(model, optimizer, DataLoader(Parts(), batch_size=24), num_shards=3)
for _ in loader.epochs(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
