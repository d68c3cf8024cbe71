"""Fetching shards of map-style datasets, each sample with its own seed, in this process or in DataLoader workers."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from resile_shared.errors import UsageError

from ..seeds import DrawDetector, mix, seed_all, seed_torch
from .batches import Indices
from .shared_batches import use_unnamed_memory_if_full

Collate = Callable[[list[Any]], Any]


class ShardKey(NamedTuple):
    """Names the samples of one shard of one epoch."""

    epoch: int
    indices: Indices


class Fetched(NamedTuple):
    """A collated shard and the indices that were really read for it."""

    indices: Indices
    batch: Any


def checked_dataset(dataset: Any, *, name: str) -> Any:
    """Return ``dataset`` if it is map-style and not empty. Raises UsageError."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"the {name} dataset ({type(dataset).__name__}) is iterable, not map-style: give one with __len__ and "
            "__getitem__, "
            "so that every sample can be used exactly once with any number of workers"
        )
    if len(dataset) == 0:
        raise UsageError(f"the {name} dataset is empty: give one with at least one sample")
    return dataset


class Fetcher:
    """Reads the shards of one dataset.

    Sample i of epoch e is read with all generators seeded by (seed, e, i), so random augmentation depends on nothing
    else. Reading leaves generators seeded by the last sample; computing a shard seeds them again.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], object] | None = None,
    ) -> None:
        self._shards = _Shards(dataset, seed, collate_fn or default_collate)
        self._num_workers = num_workers
        self._initialize = partial(_initialize, dataset, worker_init_fn)

    def read(self, key: ShardKey) -> Fetched:
        """One shard, read in this process."""
        return self._shards[key]

    def stream(self, keys: Iterable[ShardKey]) -> Iterator[Fetched]:
        """The shards of ``keys``, in order; with ``num_workers`` processes some are read ahead."""
        if not self._num_workers:
            return map(self._shards.__getitem__, keys)
        # Without a collate_fn it would turn tuples into lists, and arrays into tensors.
        return iter(
            DataLoader(
                self._shards,
                batch_size=None,
                sampler=keys,
                num_workers=self._num_workers,
                collate_fn=_unchanged,
                worker_init_fn=self._initialize,
            )
        )


def _initialize(dataset: Any, worker_init_fn: Callable[[int], object] | None, worker: int) -> None:
    """Let a reading process find the script's ``dataset`` where PyTorch has it, and call the script's function."""
    object.__setattr__(get_worker_info(), "dataset", dataset)
    use_unnamed_memory_if_full()
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _unchanged(fetched: Any) -> Any:
    return fetched


class _Shards(Dataset[Fetched]):
    """A dataset whose items are whole shards.

    Seeding python's and numpy's generators takes longer than reading a small sample, and most datasets draw from
    torch's or from none. So only torch's is seeded for each sample until this dataset draws from another one; the first
    shard in which it does is read again. The samples are the same as if all had been seeded from the start.
    """

    def __init__(self, dataset: Any, seed: int, collate: Collate) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate
        self._draws = DrawDetector()
        self._draws_from_torch_alone = True

    def __getitem__(self, key: ShardKey) -> Fetched:
        if self._draws_from_torch_alone:
            self._draws.begin()
            fetched = self._read(key, seed_torch)
            if not self._draws.detected():
                return fetched
            self._draws_from_torch_alone = False
        return self._read(key, seed_all)

    def _read(self, key: ShardKey, seed_generators: Callable[[int], None]) -> Fetched:
        samples = []
        fetched = []
        place = f"{self._seed}/sample/{key.epoch}"
        for index in key.indices.tolist():
            seed_generators(mix(place, index))
            samples.append(self._dataset[index])
            fetched.append(index)
        return Fetched(np.array(fetched, dtype=np.int64), self._collate(samples))
