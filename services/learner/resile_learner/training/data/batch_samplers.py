"""The batches of an epoch that a batch sampler draws: the same on every worker, whenever it joins."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from resile_shared.errors import UsageError

from ..seeds import mix
from .batches import START, Batch, BatchPlan, Indices, Position, default_num_shards
from .drawing import drawing

KEPT_EPOCHS = 2
_MIN_LIMIT = 1 << 20
_LIMIT_PASSES = 16


class BatchSampler(Protocol):
    """Draws the batches of an epoch, each a list of indices, as torch.utils.data.BatchSampler does."""

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the next epoch."""


class DrawnBatches(NamedTuple):
    """The batches of one epoch."""

    indices: Indices
    """The indices of all batches, one batch after the other."""
    ends: Indices
    """For each batch, the number of indices up to its end."""


class BatchOrder:
    """What ``sampler`` yields in each epoch, with all generators seeded by (``seed``, epoch): see `SamplerOrder`.

    Raises UsageError for a sampler that draws differently each time, for empty batches, for indices that are not those
    of ``num_samples`` samples, for epochs with different numbers of batches, and for what may have no end: more batches
    than ``len(sampler)``, or as many indices as 16 passes over the dataset have, and at least 1,048,576, in one batch
    (in one epoch if the sampler has no length).
    """

    def __init__(self, sampler: BatchSampler, *, num_samples: int, seed: int) -> None:
        self._sampler = sampler
        self._name = type(sampler).__name__
        self._num_samples = num_samples
        self._seed = seed
        self._kept: dict[int, DrawnBatches] = {}
        self._limit = max(_MIN_LIMIT, _LIMIT_PASSES * num_samples)
        self._num_batches: int | None = len(sampler) if isinstance(sampler, Sized) else None
        first, again = self._draw(0), self(0)
        if not all(np.array_equal(*pair) for pair in zip(first, again, strict=True)):
            raise UsageError(
                f"the batch sampler ({self._name}) yields other batches each time it is asked for the same epoch, and "
                "workers would not use the same samples: let it draw from the global generators, from its own "
                "self.generator, or from the epoch that set_epoch(epoch) gets, and keep no state between epochs"
            )

    def __call__(self, epoch: int) -> DrawnBatches:
        """The batches of ``epoch``, in order."""
        if epoch not in self._kept:
            if len(self._kept) == KEPT_EPOCHS:
                del self._kept[next(iter(self._kept))]
            self._kept[epoch] = self._draw(epoch)
        return self._kept[epoch]

    def _draw(self, epoch: int) -> DrawnBatches:
        batches: list[Indices] = []
        num_indices = 0
        with drawing(self._sampler, mix(self._seed, "order", epoch), epoch):
            for batch in self._sampler:
                if len(batches) == self._num_batches:
                    raise self._wrong_number(f"more than {self._num_batches}", epoch)
                indices = np.array([int(index) for index in islice(batch, self._limit)], dtype=np.int64)
                self._check_batch(indices, epoch)
                batches.append(indices)
                num_indices = len(indices) + (num_indices if self._num_batches is None else 0)
                self._check_end(num_indices, epoch)
        if not batches or len(batches) != (self._num_batches or len(batches)):
            raise self._wrong_number(str(len(batches)), epoch)
        self._num_batches = len(batches)
        return DrawnBatches(np.concatenate(batches), np.cumsum([len(batch) for batch in batches], dtype=np.int64))

    def _check_batch(self, indices: Indices, epoch: int) -> None:
        if not len(indices):
            raise UsageError(f"the batch sampler ({self._name}) yields an empty batch in epoch {epoch}: leave it out")
        if not 0 <= indices.min() <= indices.max() < self._num_samples:
            raise UsageError(
                f"the batch sampler ({self._name}) yields indices from {indices.min()} to {indices.max()} in epoch "
                f"{epoch}, and the dataset has {self._num_samples} samples"
            )

    def _check_end(self, num_indices: int, epoch: int) -> None:
        if num_indices >= self._limit:
            where = f"epoch {epoch}" if self._num_batches is None else f"a batch of epoch {epoch}"
            raise UsageError(
                f"the batch sampler ({self._name}) yields {num_indices} indices and more in {where}, and may have no "
                "end: end each batch and each epoch, as with itertools.islice, or give it __len__ if epochs are so long"
            )

    def _wrong_number(self, found: str, epoch: int) -> UsageError:
        return UsageError(
            f"the batch sampler ({self._name}) yields {found} batches in epoch {epoch} instead of "
            f"{self._num_batches or 'one or more'}: the number of iterations depends on it, so give all epochs the "
            "same number, and let __len__ return it"
        )


@dataclass(frozen=True)
class SampledBatches(BatchPlan):
    """The batches that a batch sampler draws, of any length; ``batch_size`` is the longest of the first epoch.

    A shorter batch has fewer shards, each of about the usual size; a longer one has larger shards.
    """

    drawn: BatchOrder | None = None

    @property
    def joins_lone_sample(self) -> bool:
        """Never: the batch sampler says what a batch is."""
        return False

    @property
    def per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return len(self.ends(0))

    def num_batches(self, position: Position, *, epochs: int) -> int:
        """Number of batches from ``position`` to the end of all ``epochs``."""
        if position.epoch >= epochs:
            return 0
        return self.per_epoch - self._number(position) + (epochs - position.epoch - 1) * self.per_epoch

    def position(self, number: int, *, start: Position = START) -> Position:
        """Where batch ``number`` begins, counted from the one that begins at ``start``."""
        epochs, number = divmod(self._number(start) + number, self.per_epoch)
        epoch = start.epoch + epochs
        return Position(epoch, int(self.ends(epoch)[number - 1]) if number else 0)

    def batch(self, position: Position, *, num_workers: int | None = None) -> Batch:
        """Return the batch that begins at ``position``; in fast mode for ``num_workers``."""
        epoch, start = position
        ends = self.ends(epoch)
        number = self._number(position)
        indices = self._order(epoch)[start : int(ends[number])]
        following = Position(epoch + 1) if number == len(ends) - 1 else Position(epoch, int(ends[number]))
        return self.cut(epoch, indices, following, num_workers=num_workers)

    def ends(self, epoch: int) -> Indices:
        """For each batch of ``epoch``, how many samples there are up to its end."""
        assert self.drawn is not None
        return self.drawn(epoch).ends

    def _number(self, position: Position) -> int:
        return int(np.searchsorted(self.ends(position.epoch), position.sample, side="right"))


def sampled_batches(
    sampler: BatchSampler, *, num_samples: int, num_shards: int | None, seed: int, more: dict[str, Any]
) -> SampledBatches:
    """The plan of a batch sampler. Raises UsageError, also if settings in ``more`` would cut batches differently."""
    for name, value in more.items():
        if value:
            raise UsageError(
                f"{name} was given beside a batch sampler, which decides by itself which samples make a batch: leave "
                f"{name} out, or give batch_size and a sampler"
            )
    if hasattr(sampler, "num_replicas"):
        raise UsageError(
            f"the batch sampler ({type(sampler).__name__}) divides the batches among processes: use one that yields "
            "all batches, since workers share each of them"
        )
    drawn = BatchOrder(sampler, num_samples=num_samples, seed=seed)
    first = drawn(0)
    longest = int(np.diff(first.ends, prepend=0).max())
    return SampledBatches(
        len(first.indices),
        longest,
        default_num_shards(longest) if num_shards is None else num_shards,
        seed,
        order=lambda epoch: drawn(epoch).indices,
        drawn=drawn,
    )
