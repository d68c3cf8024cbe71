"""The models and datasets that the benches train: MLPs of a size to choose, and those of the examples."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Workload:
    """What is trained: ``loss(model, batch)`` is the mean over a collated batch."""

    model: nn.Module
    dataset: Dataset[Any]
    loss: LossFunction
    batch_size: int
    """Samples in the global batch."""


class RandomVectors(Dataset[tuple[Tensor, Tensor]]):
    """``length`` samples of ``width`` random numbers, to be told apart into ten classes."""

    def __init__(self, length: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(length, width, generator=generator)
        self._targets = torch.randint(0, 10, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]


def mlp(hidden: int, *, layers: int, width: int = 64) -> nn.Module:
    """Fully connected, with ``layers`` square layers of ``hidden`` units: about layers x hidden^2 parameters."""
    square = [layer for _ in range(layers) for layer in (nn.Linear(hidden, hidden), nn.ReLU())]
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), *square, nn.Linear(hidden, 10))


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of classes."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def mlp_of(millions: int, *, batch_size: int) -> Workload:
    """An MLP of about 1 or 100 million parameters on random vectors."""
    model = mlp(576, layers=3) if millions == 1 else mlp(2048, layers=24)
    return Workload(model, RandomVectors(960, 64), classify, batch_size)


def digits() -> Workload:
    """The network of examples/digits.py on its augmented images."""
    sys.path.append(EXAMPLES)
    from digits import Digits, network

    return Workload(network(), Digits(augment=True), classify, batch_size=192)


def next_character(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of the characters that follow."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def gpt() -> Workload:
    """The small GPT of examples/gpt.py on source code."""
    sys.path.append(EXAMPLES)
    from gpt import GPT, SourceCode

    model, dataset = GPT(layers=2, width=64, block=64), SourceCode(block=64, kilobytes=600)
    return Workload(model, dataset, next_character, batch_size=32)


WORKLOADS: dict[str, Callable[[], Workload]] = {"digits": digits, "gpt": gpt, "mlp": lambda: mlp_of(1, batch_size=96)}
