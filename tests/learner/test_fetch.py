import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from resile_learner.training.fetch import Fetcher, ShardKey, checked_dataset
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
