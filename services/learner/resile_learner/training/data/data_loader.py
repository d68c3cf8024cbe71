"""What a DataLoader says about the order of samples and how they are read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from resile_shared.errors import UsageError

from .batch_samplers import BatchSampler
from .fetch import Collate
from .samplers import Sampler

if TYPE_CHECKING:
    from ..settings import TrainingSettings


@dataclass(frozen=True)
class LoaderSettings:
    """The part of a DataLoader that determines its batches, and the number of its worker processes."""

    dataset: Any
    batch_size: int | None
    """The number of samples in a batch; None if a batch sampler decides."""
    shuffle: bool
    sampler: Sampler | None
    """The script's own sampler; None for the order of the dataset, shuffled or not."""
    batch_sampler: BatchSampler | None
    """The script's own batch sampler, if it has one."""
    drop_last: bool
    collate_fn: Collate
    num_workers: int
    worker_init_fn: Callable[[int], object] | None

    def applied_to(self, settings: "TrainingSettings") -> "TrainingSettings":
        """Return ``settings`` for this loader's order of samples, and its way to read them; the batch size stays."""
        return replace(
            settings,
            shuffle=self.shuffle,
            sampler=self.sampler,
            batch_sampler=self.batch_sampler,
            drop_last=self.drop_last,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            worker_init_fn=self.worker_init_fn,
        )


def read_loader(loader: Any) -> LoaderSettings:
    """Read the settings of a DataLoader. Raises UsageError for those that cannot be kept.

    Its generator is not used: the order of an epoch is a function of the run's seed. What concerns speed alone
    (pin_memory, prefetch_factor, timeout, persistent_workers) is left out.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(f"the loader is a {type(loader).__name__}: prepare takes a torch.utils.data.DataLoader")
    batches = loader.batch_sampler
    if batches is None:
        raise UsageError(
            "the loader has batch_size=None, so that each item of the dataset is a batch, which cannot be cut into "
            "shards: let the dataset return samples, and give the loader a batch_size or a batch_sampler"
        )
    own: Any = batches
    is_usual = type(own) is torch.utils.data.BatchSampler
    has_sampler = is_usual and not isinstance(loader.dataset, IterableDataset)
    return LoaderSettings(
        dataset=loader.dataset,
        batch_size=own.batch_size if is_usual else None,
        shuffle=is_usual and _is_shuffled(own.sampler),
        sampler=_own_sampler(own.sampler) if has_sampler else None,
        batch_sampler=None if is_usual else own,
        drop_last=is_usual and own.drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
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
