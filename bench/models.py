"""The models and datasets that the benches train; two of them are those of the examples."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

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
    model = mlp(576, layers=3) if millions == 1 else mlp(4096, layers=6)
    return Workload(model, RandomVectors(960, 64), classify, batch_size)


def digits() -> Workload:
    """The network of examples/digits.py on its augmented images."""
    from digits import Digits, network

    return Workload(network(), Digits(augment=True), classify, batch_size=192)


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Every window of ``length`` characters of a text made of the standard library's own sources."""

    def __init__(self, length: int, *, max_characters: int = 200_000) -> None:
        import argparse as one
        import typing as other

        text = "".join(Path(str(module.__file__)).read_text() for module in (one, other))[:max_characters]
        letters = sorted(set(text))
        self.num_letters = len(letters)
        self._text = torch.tensor([letters.index(letter) for letter in text])
        self._length = length

    def __len__(self) -> int:
        return len(self._text) - self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._text[index : index + self._length + 1]
        return window[:-1], window[1:]


class Gpt(nn.Module):
    """A small decoder-only transformer over characters."""

    def __init__(self, num_letters: int, *, length: int, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(num_letters, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_letters, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, letters: Tensor) -> Tensor:
        hidden = self.letters(letters) + self.places
        return self.head(self.norm(self.blocks(hidden, mask=self.mask, is_causal=True)))


def next_letter(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of the next letter."""
    letters, targets = batch
    return F.cross_entropy(model(letters).flatten(0, 1), targets.flatten())


def gpt() -> Workload:
    """A char-GPT of 0.8 million parameters."""
    dataset = Characters(64)
    return Workload(Gpt(dataset.num_letters, length=64), dataset, next_letter, batch_size=64)


WORKLOADS: dict[str, Callable[[], Workload]] = {"digits": digits, "gpt": gpt}
