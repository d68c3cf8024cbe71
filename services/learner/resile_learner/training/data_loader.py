"""What a DataLoader says about the order of samples and how they are read."""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from resile_shared.errors import UsageError

from .fetch import Collate


@dataclass(frozen=True)
class LoaderSettings:
    """The part of a DataLoader that determines its batches, and the number of its worker processes."""

    dataset: Any
    batch_size: int
    shuffle: bool
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
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError("the loader has a batch sampler of its own: give it batch_size=... instead")
    if loader.worker_init_fn is not None:
        raise UsageError(
            "the loader has a worker_init_fn, which does not run: samples are seeded one by one; open what a dataset "
            "reads from in its __getitem__, the first time"
        )
    return LoaderSettings(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        shuffle=_shuffles(loader.sampler),
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
    )


def _shuffles(sampler: Any) -> bool:
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return True
    raise UsageError(
        f"the loader has a sampler ({type(sampler).__name__}) that workers cannot share: use shuffle=True or "
        "shuffle=False, and leave out a DistributedSampler"
    )
