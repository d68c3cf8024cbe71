"""What a DataLoader says about the order of samples and how they are read."""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from resile_shared.errors import UsageError

from .fetch import Collate
from .samplers import Sampler


@dataclass(frozen=True)
class LoaderSettings:
    """The part of a DataLoader that determines its batches, and the number of its worker processes."""

    dataset: Any
    batch_size: int
    shuffle: bool
    sampler: Sampler | None
    """None: the order of the dataset, shuffled or not."""
    drop_last: bool
    collate_fn: Collate
    num_workers: int


def read_loader(loader: Any) -> LoaderSettings:
    """Read the settings of a DataLoader over a map-style dataset. Raises UsageError for what cannot hold.

    Its generator is not used: the order of an epoch is a function of the run's seed. What concerns speed alone
    (pin_memory, prefetch_factor, timeout, persistent_workers) is left out.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(f"the loader is a {type(loader).__name__}: prepare takes a torch.utils.data.DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"the loader's dataset ({type(loader.dataset).__name__}) is iterable, not map-style: give one with __len__ "
            "and __getitem__, so that every sample can be used exactly once with any number of workers"
        )
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        raise UsageError(
            "the loader has a batch sampler of its own: give it batch_size=... and a sampler instead, so that batches "
            "can be cut into shards"
        )
    if loader.worker_init_fn is not None:
        raise UsageError(
            "the loader has a worker_init_fn, which does not run: samples are seeded one by one; open what a dataset "
            "reads from in its __getitem__, the first time"
        )
    return LoaderSettings(
        dataset=loader.dataset,
        batch_size=batches.batch_size,
        shuffle=_is_shuffled(batches.sampler),
        sampler=_own_sampler(batches.sampler),
        drop_last=batches.drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
    )


def _is_shuffled(sampler: Any) -> bool:
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


def _own_sampler(sampler: Any) -> Any:
    """The sampler, unless it is the one that DataLoader makes by itself."""
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            "the loader has a DistributedSampler, which divides the samples among processes: use shuffle=True or "
            "shuffle=False, since workers share each batch"
        )
    return None if type(sampler) is SequentialSampler or _is_shuffled(sampler) else sampler
