"""What a stream needs to be one, and how its samples, its state and the script's random numbers are kept apart."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from resile_learner.training.data.stream_reader import StreamReader, is_stream


class Sized(IterableDataset[int]):
    """Iterable, though it has the methods of a map-style dataset too."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Indexed:
    """Iterable by its indices alone, without a length."""

    def __getitem__(self, index: int) -> int:
        return index

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Bag:
    """Iterable, with a length, and without indices."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Sized(), True),
        (Indexed(), True),
        (Bag(), True),
        (iter([1]), True),
        ([1, 2], False),
        (TensorDataset(torch.ones(3)), False),
        (3, False),
    ],
)
def test_a_stream_is_iterable_and_not_map_style(dataset: Any, expected: bool) -> None:
    assert is_stream(dataset) is expected


def read(reader: StreamReader, count: int) -> list[Any]:
    return [reader.read() for _ in range(count)]


class Permuted:
    """Draws the order of an epoch when its iterator is made."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(100), 100))


def test_an_order_that_is_drawn_with_the_iterator_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        random.seed()
        reader = StreamReader(Permuted(), seed=seed)
        reader.open(epoch, 0, None)
        return read(reader, 100)

    orders = [order(*arguments) for arguments in [(1, 0), (1, 0), (2, 0), (1, 1)]]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]


class Epochs:
    """Its samples are the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from [self.epoch] * 5


def test_a_stream_is_told_each_epoch_before_it_begins() -> None:
    reader = StreamReader(Epochs(), seed=0)
    for epoch in (0, 1, 4):
        reader.open(epoch, 2, None)
        assert read(reader, 3) == [epoch] * 3


class Live:
    """Returns the state that it goes on changing, and changes the one that it is given."""

    def __init__(self) -> None:
        self.state = {"next": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < 100:
            self.state["next"] += 1
            yield self.state["next"]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class LiveIterator(Live):
    """The same, as an iterator that can be iterated again."""

    def __iter__(self) -> "LiveIterator":
        return self

    def __next__(self) -> int:
        self.state["next"] += 1
        return self.state["next"]


class OfIterator:
    """The same, as an iterator that is made for each epoch."""

    def __iter__(self) -> LiveIterator:
        return LiveIterator()


@pytest.mark.parametrize("kind", [Live, LiveIterator, OfIterator])
def test_a_state_stays_that_of_its_sample_whatever_the_stream_does_with_it(kind: Any) -> None:
    reader = StreamReader(kind(), seed=0)
    reader.open(0, 0, None)
    assert read(reader, 3) == [1, 2, 3]
    state = reader.state()
    read(reader, 4)
    for _ in range(2):
        other = StreamReader(kind(), seed=0)
        other.open(0, 3, state)
        assert other.sample == 3
        assert read(other, 2) == [4, 5]


class Saving(Permuted):
    """Half of the protocol, of no use."""

    def state_dict(self) -> Any:
        return {}


class Loading(Permuted):
    """The other half."""

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("kind", [Permuted, Saving, Loading])
def test_a_stream_without_both_methods_has_no_state(kind: Any) -> None:
    reader = StreamReader(kind(), seed=0)
    reader.open(0, 0, None)
    assert reader.state() is None


class Noise:
    """Its epochs begin with different samples."""

    def __iter__(self) -> Iterator[float]:
        yield from np.random.rand(3)


def test_the_first_samples_of_epochs_may_differ() -> None:
    reader = StreamReader(Noise(), seed=0)
    for epoch in (0, 1, 0):
        reader.open(epoch, 1, None)
        assert len(read(reader, 2)) == 2
