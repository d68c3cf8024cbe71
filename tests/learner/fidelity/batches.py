"""Situations of loops whose batches are not those of a dataset in some order."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from .situation import Script, data, error, loop, perceptron, sgd, train_with


class Indexed(Dataset[Any]):
    def __len__(self) -> int:
        return len(data())

    def __getitem__(self, index: int) -> Any:
        return index, *data()[index]


@loop("losses kept for each sample by its index, as weights of the next epoch", begins_late=True)
def kept_losses(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(Indexed()))
    kept = torch.ones(len(data()))
    for _ in script.epochs():
        for index, inputs, targets in loader:
            optimizer.zero_grad()
            each = F.cross_entropy(model(inputs), targets, reduction="none")
            loss = (each * kept[index]).sum() / kept[index].sum()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            kept[index] = each.detach()
            script.print(loss)


@loop("a weighted sampler", is_random=True)
def weighted_sampler(script: Script) -> None:
    model = perceptron()
    sampler = WeightedRandomSampler((1 + 4 * data().tensors[1]).tolist(), len(data()))
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(data(), sampler=sampler))
    train_with(script, model, optimizer, loader)


@loop("a shuffling loader", is_random=True)
def shuffled(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(data(), shuffle=True))
    train_with(script, model, optimizer, loader)


@loop("batches that a batch sampler makes, of different sizes")
def batch_sampler(script: Script) -> None:
    model = perceptron()
    batches = [list(range(40)), list(range(40, 60)), list(range(60, 96))]
    loader = torch.utils.data.DataLoader(data(), batch_sampler=batches)
    model, optimizer, loader = script.prepare(model, sgd(model), loader)
    train_with(script, model, optimizer, loader)


@loop("`drop_last`")
def dropped(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(data(90), drop_last=True))
    train_with(script, model, optimizer, loader)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from data()


@loop("an IterableDataset")
def stream(script: Script) -> None:
    model = perceptron()
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(Stream()))
    train_with(script, model, optimizer, loader)


def collate(samples: Any) -> Any:
    """Cut the texts of a batch at the longest one."""
    x, y = torch.utils.data.default_collate(samples)
    lengths = 1 + (torch.arange(len(x)) + int(x[0, 0] > 0)) % 6
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return x[:, : mask.shape[1]] * mask, mask.float(), y


@loop("texts padded to the longest one of the batch by `collate_fn`")
def padded(script: Script) -> None:
    model: Any = nn.GRU(1, 4, batch_first=True)
    loader = script.loader_of(data(), collate_fn=collate)
    model, optimizer, loader = script.prepare(model, sgd(model), loader)
    for _ in script.epochs():
        for inputs, mask, targets in loader:
            optimizer.zero_grad()
            outputs = (model(inputs[..., None])[0] * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            loss = F.cross_entropy(outputs, targets)
            loss.backward()
            optimizer.step()
            script.print(loss)


class Curriculum(TensorDataset):
    """Its samples depend on what the script sets."""

    strength = 1.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.strength, y


@loop("a dataset that the script changes before each epoch")
def changed_dataset(script: Script) -> None:
    model, dataset = perceptron(), Curriculum(*data().tensors)
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(dataset))
    for epoch in script.epochs():
        dataset.strength = 1.0 + epoch
        for batch in loader:
            optimizer.zero_grad()
            loss = error(model, batch)
            loss.backward()
            optimizer.step()
            script.print(loss)


@loop("labels that the body replaces in its dataset")
def replaced_labels(script: Script) -> None:
    model, dataset = perceptron(), data()
    labels = dataset.tensors[1]
    model, optimizer, loader = script.prepare(model, sgd(model), script.loader_of(dataset))
    for _ in script.epochs():
        for batch in loader:
            optimizer.zero_grad()
            loss = error(model, batch)
            loss.backward()
            optimizer.step()
            script.print(loss)
        with torch.no_grad():
            labels.copy_(model(dataset.tensors[0]).argmax(1))


@loop("batches of a second loader, by `zip`")
def zipped(script: Script) -> None:
    model = perceptron()
    other = script.loader_of(TensorDataset(data().tensors[0].flip(0)))
    model, optimizer, loader = script.prepare(model, sgd(model))
    for _ in script.epochs():
        for batch, (unlabeled,) in zip(loader, other, strict=True):
            optimizer.zero_grad()
            loss = error(model, batch) + 0.1 * model(unlabeled).square().mean()
            loss.backward()
            optimizer.step()
            script.print(loss)
