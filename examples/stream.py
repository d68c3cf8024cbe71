"""A stream, made elastic by `prepare`: handwritten digits, shuffled on the way by a buffer.

    python examples/stream.py
    resile run examples/stream.py --workers 3

Both end with the same parameters, bit for bit. Lines that an ordinary script would not have are marked with `# Resile`.
"""

import random
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import resile.training  # Resile

EPOCHS = 4


class Digits(IterableDataset[tuple[Any, Any]]):
    """The digits, one after the other, in another order in each epoch."""

    def __len__(self) -> int:
        return 1797

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        digits, buffer = load_digits(), []
        for image, target in zip(digits.data, digits.target, strict=True):
            buffer.append((image, target))
            if len(buffer) == 500:
                yield buffer.pop(random.randrange(500))
        random.shuffle(buffer)
        yield from buffer


def collate(samples: list[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    """What takes time belongs here: it runs for the samples of this worker alone."""
    images, targets = zip(*samples, strict=True)
    return torch.tensor(images).float() / 16, torch.tensor(targets)


resile.training.seed(0)  # Resile: instead of torch.manual_seed(0)
loader = DataLoader(Digits(), batch_size=96, collate_fn=collate)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = resile.training.prepare(model, optimizer, loader)  # Resile

for epoch in loader.epochs(EPOCHS):  # Resile: instead of range(EPOCHS)
    for images, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    print(f"epoch {epoch}: loss {loader.loss:.3f}")

if loader.is_lowest_rank:  # Resile
    torch.save(model.state_dict(), "digits.pt")
