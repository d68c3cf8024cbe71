"""Situations of models, in the usual loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from resile.training import buffers

from .situation import data, loss, perceptron


def made(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 16), *(layer() for layer in layers), nn.Linear(16, 4))


class Observing(nn.Module):
    """Its buffers count what it is given (counting_buffers.py)."""

    seen: Tensor
    positives: Tensor
    largest: Tensor
    is_far: Tensor

    def __init__(self, *, uses: bool) -> None:
        super().__init__()
        self.layers = perceptron()
        self.uses = uses
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("positives", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("is_far", torch.zeros(8, dtype=torch.bool))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += len(inputs)
            self.positives += (inputs[:, 0] > 0.8).sum()
            self.largest.copy_(torch.maximum(self.largest, inputs.abs().max()))
            self.is_far |= (inputs > 2.0).any(0)
        logits: Tensor = self.layers(inputs)
        return logits * (self.seen / self.positives.clamp(min=1) / 4) if self.uses else logits


def declared(model: nn.Module) -> nn.Module:
    buffers(model, seen="sum", positives="sum", largest="max", is_far="any")
    return model


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = perceptron(), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        outputs: Tensor = self.layers(inputs) * min(1.0, self.calls / 6)
        return outputs


class Queue(nn.Module):
    """Keys of earlier batches are negatives, as in MoCo."""

    keys: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.register_buffer("keys", F.normalize(torch.randn(SLOTS, 4), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = F.normalize(self.layers(inputs), dim=1)
        logits = rows @ self.keys.clone().T
        if self.training:
            slots = (int(self.place) + torch.arange(len(rows))) % SLOTS
            self.keys[slots] = rows.detach()
            self.place.copy_((self.place + len(rows)) % SLOTS)
        return logits


SLOTS = 192


def declared_queue() -> nn.Module:
    model = Queue()
    buffers(model, keys="concat", place="concat")
    return model


class Codes(nn.Module):
    """A codebook that follows the sums of its rows by a moving average, as in VQ-VAE."""

    codes: Tensor
    sizes: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.register_buffer("codes", torch.randn(4, 4))
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("sums", self.codes.clone())

    def means(self) -> Tensor:
        return self.sums / self.sizes[:, None]

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.layers(inputs)
        nearest = F.one_hot(torch.cdist(rows.detach(), self.codes).argmin(1), 4).float()
        found = nearest @ self.codes
        if self.training:
            self.sizes.mul_(0.9).add_(nearest.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(nearest.T @ rows.detach(), alpha=0.1)
            self.codes.copy_(self.means())
        return rows + 0.5 * (found - rows).detach()


def declared_codes() -> nn.Module:
    model = Codes()
    buffers(model, sizes=("sum", 0.9), sums=("sum", 0.9), codes=Codes.means)
    return model


class Carrying(nn.Module):
    """It keeps its hidden state from batch to batch (lstm_hidden_one_worker.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 4)
        self.hidden: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, hidden = self.recurrent(inputs[..., None], self.hidden)
        self.hidden = tuple(each.detach() for each in hidden)
        logits: Tensor = self.head(outputs[:, -1])
        return logits


class TimeFirst(nn.Module):
    """Its rows are steps of time for the recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.recurrent(inputs[:, None])[0][:, 0]
        return outputs


class Packed(nn.Module):
    """It pads its outputs to the longest text of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        lengths = (inputs > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(inputs[..., None], lengths, batch_first=True, enforce_sorted=False)
        outputs: Tensor = self.head(nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0])
        return outputs


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs.mul_(0.5))
        return outputs


class Tied(nn.Module):
    """Two of its layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(inputs).tanh())
        return outputs


class Emptied(nn.Module):
    """One of its parameters has no elements (empty_parameter.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.none = perceptron(), nn.Linear(8, 0, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs) + self.none(inputs).sum() * 0
        return outputs


class Listed(nn.Module):
    """It makes a batch of a list of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, inputs: Tensor) -> list[Tensor]:
        return list(self.layers(inputs).unbind(0))


class Standardizing(nn.Module):
    """It divides by the deviation of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers((inputs - inputs.mean(0)) / inputs.std(0))
        return outputs


class Averaging(nn.Module):
    """It standardizes by moving averages of its own."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(inputs.mean(0), 0.1)
        outputs: Tensor = self.layers(inputs - self.average)
        return outputs


def hooked_layer() -> nn.Module:
    model = perceptron()
    assert isinstance(model, nn.Sequential)
    model[1].register_forward_hook(lambda module, inputs, outputs: outputs - outputs.mean(0))
    return model


def hooked_parameter() -> nn.Module:
    model = perceptron()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / (1e-3 + gradient.norm()))
    return model


def normed() -> nn.Module:
    model = perceptron()
    assert isinstance(model, nn.Sequential)
    nn.utils.parametrizations.spectral_norm(model[0])
    return model


def frozen_norm() -> nn.Module:
    model = made(lambda: nn.BatchNorm1d(16))()
    assert isinstance(model, nn.Sequential)
    model[1].eval()
    return model


class Padded(nn.Module):
    """Its outputs have a row more than its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(F.pad(inputs, (0, 0, 0, 1)))
        return outputs


def classified(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "batch_norm": ("BatchNorm", made(lambda: nn.BatchNorm1d(16))),
    "instance_norm": (
        "running statistics of InstanceNorm",
        made(
            lambda: nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten())
        ),
    ),
    "layer_norm": ("LayerNorm and GroupNorm", made(lambda: nn.LayerNorm(16), lambda: nn.GroupNorm(4, 16))),
    "dropout": ("dropout", made(lambda: nn.Dropout(0.5))),
    "own_statistics": ("statistics of the batch, computed by hand", Standardizing),
    "own_average": ("a moving average of the batch in a buffer, which the model uses", Averaging),
    "counters": ("counters, extremes and flags in buffers", lambda: Observing(uses=False)),
    "declared_counters": ("the same, declared by `buffers(...)`", lambda: declared(Observing(uses=False))),
    "used_counters": ("counters in buffers that the model uses (counting_buffers.py)", lambda: Observing(uses=True)),
    "declared_used_counters": ("the same, declared", lambda: declared(Observing(uses=True))),
    "counted_calls": ("an attribute that counts calls, for a warm-up", Counting),
    "queue": ("a queue of keys in buffers (MoCo)", Queue),
    "declared_queue_of_keys": ("the same, declared", declared_queue),
    "codebook": ("a codebook that follows moving averages (VQ-VAE)", Codes),
    "declared_codebook": ("the same, declared", declared_codes),
    "carried_state": ("a hidden state that the model carries to the next batch", Carrying),
    "time_first": ("steps of time in the first dimension", TimeFirst),
    "in_place": ("inputs that the model changes in place", InPlace),
    "tied_weights": ("tied weights", Tied),
    "empty_parameter": ("a parameter without elements (empty_parameter.py)", Emptied),
    "hook_of_a_layer": ("a hook of a layer that mixes rows", hooked_layer),
    "hook_of_parameters": ("hooks of parameters that normalize gradients", hooked_parameter),
    "spectral_norm": ("spectral norm, whose buffers follow the weights", normed),
    "compiled": ("`torch.compile` before training", lambda: torch.compile(perceptron(), backend="eager")),
}
IS_RANDOM = ("dropout",)
NEEDS_ORDER = ("queue", "declared_queue_of_keys", "carried_state", "time_first")


def _declare(name: str) -> None:
    text, model = MODELS[name]

    def computed(outputs: Tensor, targets: Tensor) -> Tensor:
        return classified(outputs, targets)

    computed.__name__ = name
    loss(text, model, is_random=name in IS_RANDOM, needs_order=name in NEEDS_ORDER)(computed)


for each in MODELS:
    _declare(each)


@loss("outputs as long as the longest text of the batch", Packed)
def longest_text(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.sum(1) / 8, targets)


@loss("outputs in a list, one for each sample", Listed)
def list_of_outputs(outputs: list[Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(torch.stack(outputs), targets)


@loss("outputs with a row more than the batch", Padded)
def more_rows(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:-1] + outputs[-1], targets)


@loss("a last batch of one sample", data=lambda: data(65))
def last_of_one(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)
