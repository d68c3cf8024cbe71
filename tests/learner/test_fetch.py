import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from resile_learner.training.data.fetch import Fetcher, ShardKey, checked_dataset
from resile_shared.errors import UsageError


class Random:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return index + random.random() + float(np.random.rand()) + float(torch.rand(()))


def shard(*indices: int, epoch: int = 0) -> ShardKey:
    return ShardKey(epoch, np.array(indices))


def test_a_sample_depends_on_seed_epoch_and_index_alone() -> None:
    fetcher = Fetcher(Random(), seed=1)
    together, alone, other_epoch = fetcher.stream([shard(2, 5, 7), shard(5), shard(5, epoch=1)])
    assert together.batch[1] == alone.batch[0]
    assert alone.batch[0] != other_epoch.batch[0]
    (other_seed,) = Fetcher(Random(), seed=2).stream([shard(5)])
    assert alone.batch[0] != other_seed.batch[0]


def test_worker_processes_fetch_the_same() -> None:
    keys = [shard(0, 1), shard(2), shard(3, 4, 5)]
    here = list(Fetcher(Random(), seed=1).stream(keys))
    there = list(Fetcher(Random(), seed=1, num_workers=2).stream(keys))
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.batch, b.batch)
        assert a.indices.tolist() == b.indices.tolist()


class RarelyRandom:
    """Draws from python's generator for sample 7 alone, and from numpy's when it collates."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return random.random() if index == 7 else float(torch.rand(()))


def noisy(samples: list[float]) -> list[float]:
    return [*samples, float(np.random.rand())]


def test_worker_processes_leave_the_kinds_of_a_batch_as_they_are() -> None:
    keys = [ShardKey(0, np.arange(3))]
    fetcher = Fetcher(list(range(3)), seed=1, collate_fn=lambda samples: (len(samples), [np.ones(2)]), num_workers=1)
    (there,) = fetcher.stream(keys)
    here = fetcher.read(keys[0])
    assert [type(each) for each in (there.batch, there.batch[1][0], there.indices)] == [tuple, np.ndarray, np.ndarray]
    assert [type(each) for each in (here.batch, here.batch[1][0], here.indices)] == [tuple, np.ndarray, np.ndarray]


def test_a_generator_that_is_rarely_drawn_from_is_seeded_all_the_same() -> None:
    late = Fetcher(RarelyRandom(), seed=1).stream([shard(1, 2), shard(3, 7, 4), shard(1, 2)])
    first, second, again = (fetched.batch.tolist() for fetched in late)
    (alone,) = Fetcher(RarelyRandom(), seed=1).stream([shard(7)])
    assert alone.batch.tolist() == [second[1]]
    assert again == first


def test_what_collating_draws_depends_on_the_shard_alone() -> None:
    fetcher = Fetcher([1.0] * 10, seed=1, collate_fn=noisy)
    before, other, after = (fetched.batch[-1] for fetched in fetcher.stream([shard(1, 2), shard(3), shard(1, 2)]))
    assert before == after != other


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


@pytest.mark.parametrize("dataset", [Stream(), iter([1, 2]), (x for x in [1])])
def test_iterable_datasets_are_refused_with_what_to_give_instead(dataset: object) -> None:
    with pytest.raises(UsageError, match="map-style"):
        checked_dataset(dataset, name="training")


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        checked_dataset([], name="training")


class Offset(Dataset[int]):
    """A dataset to which its readers add something, each at its start."""

    offset = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def add_offset(worker: int) -> None:
    info = get_worker_info()
    assert isinstance(info, WorkerInfo)
    assert info.id == worker
    info.dataset.offset = 10


@pytest.mark.parametrize(("num_workers", "first"), [(0, 0), (2, 10)])
def test_a_function_that_initializes_readers_finds_the_dataset_of_the_script(num_workers: int, first: int) -> None:
    """As in PyTorch, it is not called where this process reads."""
    fetcher = Fetcher(Offset(), seed=0, num_workers=num_workers, worker_init_fn=add_offset)
    keys = [ShardKey(0, np.arange(start, start + 2)) for start in range(0, 8, 2)]
    assert [fetched.batch[0].item() for fetched in fetcher.stream(keys)] == [first + start for start in range(0, 8, 2)]
