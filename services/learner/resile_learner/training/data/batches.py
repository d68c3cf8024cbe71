"""Which samples each iteration uses, and how its global batch is cut into shards: a function of the settings alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resile_shared.errors import UsageError

from ...collectives.tree import Interval, ranges
from ..noise import NOISE_EVERY
from ..seeds import mix

SHARD_CHOICES = (24, 12, 8, 6, 4, 2, 1)
SHARD_SAMPLES = 24
"""By default a shard has at least this many samples: a small network on a CPU takes 1.7 times as long with 8."""
FEW_SHARDS = 8
"""Up to this many shards may have as few as `MIN_SHARD_SAMPLES` samples: a job should be able to grow."""
MIN_SHARD_SAMPLES = 8
Indices = NDArray[np.int64]


def default_num_shards(batch_size: int) -> int:
    """The largest of 24, 12, 8, 6, 4, 2, 1 with at least 24 samples in a shard; for 8 or fewer, 8 are enough."""
    least = {v: MIN_SHARD_SAMPLES if v <= FEW_SHARDS else SHARD_SAMPLES for v in SHARD_CHOICES}
    return next((v for v in SHARD_CHOICES if batch_size // v >= least[v]), 1)


class Position(NamedTuple):
    """A place in the data of a run: the epoch, and how many of its samples come before it."""

    epoch: int = 0
    sample: int = 0


START = Position()


class Batch(NamedTuple):
    """One global batch: the samples of one iteration, cut into shards, each of which is computed in one pass."""

    epoch: int
    indices: Indices
    num_shards: int
    num_leaves: int
    """The leaves of the tree that sums gradients: one for each shard or, in fast mode, for each worker's share."""
    batch_size: int
    """The number of samples of the batch unless it is the last of its epoch."""
    next: Position
    """Where the next batch begins."""
    measures_noise: bool = False
    """Whether the noise scale is estimated from the gradients of its shards."""

    @property
    def ends_epoch(self) -> bool:
        """Whether it is the last of its epoch."""
        return self.next.sample == 0

    def rows(self, leaf: int) -> slice:
        """Where the samples of one shard are."""
        num_rows = len(self.indices)
        return slice(num_rows * leaf // self.num_shards, num_rows * (leaf + 1) // self.num_shards)

    def shard(self, leaf: int) -> Indices:
        """The samples of one shard."""
        num_rows = len(self.indices)
        return self.indices[num_rows * leaf // self.num_shards : num_rows * (leaf + 1) // self.num_shards]

    def weight(self, leaf: int) -> float:
        """The share of the global batch that is in one shard."""
        return len(self.shard(leaf)) / len(self.indices)

    def held_by(self, rank: int, size: int) -> Interval:
        """The shards that ``rank`` of ``size`` members computes."""
        return ranges(self.num_shards, size)[rank]

    def leaves_of(self, rank: int, size: int) -> Interval:
        """The leaves of the tree whose gradients ``rank`` of ``size`` members computes."""
        return ranges(self.num_leaves, size)[rank]


@dataclass(frozen=True)
class BatchPlan:
    """The batches of a pass over ``num_samples`` samples, in an order that does not depend on ``batch_size``.

    Batches of different sizes can thus follow each other without a gap: each begins where the last one ended. Batches
    never cross an epoch. A last batch that is short has fewer shards, each of about the usual size and of at
    least two samples where possible; a lone leftover sample joins the batch before it. With ``drop_last`` the samples
    that do not fill a batch are left out of the epoch. A batch with fewer samples than ``num_shards`` has fewer
    shards, of two samples or more. No shard has more than ``micro_batch_size`` samples; None: no limit.
    """

    num_samples: int
    batch_size: int
    num_shards: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    order: Callable[[int], Indices] | None = None
    """The order of each epoch; None: that of the dataset, shuffled or not."""
    largest: int | None = None
    """The largest batch that may follow, for which the noise scale is measured; None: all have ``batch_size``."""
    micro_batch_size: int | None = None
    keeps_lone_sample: bool = False
    """Whether a lone leftover sample is a batch of its own, as a DataLoader has it."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise UsageError("the training dataset is empty: pass one with at least one sample")
        if self.batch_size < 1:
            raise UsageError(f"batch_size is {self.batch_size}: use 1 or more")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UsageError(f"micro_batch_size is {self.micro_batch_size}: use 1 or more, or leave it out")
        largest = max(self.batch_size, self.largest or 1)
        if not 1 <= self.num_shards <= largest:
            raise UsageError(
                f"num_shards is {self.num_shards} for a batch of {largest}: use 1 to {largest}, or leave it out"
            )
        if self.drop_last and self.num_samples < self.batch_size:
            raise UsageError(
                f"drop_last leaves nothing to train on: {self.num_samples} samples do not fill a batch of "
                f"{self.batch_size}"
            )

    @property
    def per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return self._num_batches(self.num_samples)

    @property
    def joins_lone_sample(self) -> bool:
        """Whether a lone leftover sample joins the batch before it."""
        full, rest = divmod(self.num_samples, self.batch_size)
        return bool(full) and rest == 1 and not (self.drop_last or self.keeps_lone_sample)

    def num_batches(self, position: Position, *, epochs: int) -> int:
        """Number of batches from ``position`` to the end of all ``epochs``."""
        if position.epoch >= epochs:
            return 0
        return self._num_batches(self.num_samples - position.sample) + (epochs - position.epoch - 1) * self.per_epoch

    def position(self, number: int, *, start: Position = START) -> Position:
        """Where batch ``number`` begins, counted from the one that begins at ``start``."""
        rest = self._num_batches(self.num_samples - start.sample)
        if number < rest:
            return Position(start.epoch, start.sample + number * self.batch_size)
        epochs, step = divmod(number - rest, self.per_epoch)
        return Position(start.epoch + 1 + epochs, step * self.batch_size)

    def batch(self, position: Position, *, num_workers: int | None = None) -> Batch:
        """Return the batch that begins at ``position``; in fast mode for ``num_workers``: see `cut`."""
        epoch, start = position
        stop = min(start + self.batch_size, self.num_samples)
        rest = self.num_samples - stop
        if not self.drop_last and rest < min(2, self.batch_size) and not self.keeps_lone_sample:
            stop, rest = self.num_samples, 0
        indices = self._order(epoch)[start:stop]
        ends_epoch = rest < (self.batch_size if self.drop_last else 1)
        following = Position(epoch + 1) if ends_epoch else Position(epoch, stop)
        measures_noise = self.largest is not None and start // self.batch_size % NOISE_EVERY == 0
        return self.cut(epoch, indices, following, num_workers=num_workers, measures_noise=measures_noise)

    def cut(
        self,
        epoch: int,
        indices: Indices,
        following: Position,
        *,
        num_workers: int | None,
        measures_noise: bool = False,
    ) -> Batch:
        """Cut the samples of a batch into shards.

        With ``num_workers`` each worker has an equal share of the samples, as long as there are enough, cut into as few
        equal shards as possible, but at least two in total if the noise is measured: one says nothing about it.
        """
        samples = len(indices)
        limit = self.micro_batch_size or samples
        if num_workers is None:
            shards = leaves = max(self._usual_shards(samples), -(-samples // limit))
        else:
            leaves = min(num_workers, samples)
            passes = max(-(-samples // (num_workers * limit)), 2 if measures_noise and num_workers == 1 else 1)
            shards = min(num_workers * passes, samples)
        return Batch(epoch, indices, shards, leaves, self.batch_size, following, measures_noise)

    def ends(self, epoch: int) -> Indices:
        """Where the batches of a batch sampler end in ``epoch``; empty if that follows from the sizes."""
        return np.empty(0, dtype=np.int64)

    def _num_batches(self, num_samples: int) -> int:
        full, rest = divmod(num_samples, self.batch_size)
        is_kept = not self.drop_last and (rest > 1 or (rest and (self.keeps_lone_sample or not full)))
        return max(1, full + (1 if is_kept else 0))

    def _usual_shards(self, samples: int) -> int:
        num_shards = self.num_shards if self.num_shards <= self.batch_size else max(1, self.batch_size // 2)
        if samples >= self.batch_size:
            return num_shards
        usual = self.batch_size / num_shards
        fewer = max(1, -int(-samples // usual))
        return fewer if samples // fewer >= 2 else max(1, samples // 2)

    def _order(self, epoch: int) -> Indices:
        if self.order:
            return self.order(epoch)
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        return _permutation(self.num_samples, mix(self.seed, "order", epoch))


@lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int) -> Indices:
    return np.random.Generator(np.random.Philox(seed)).permutation(num_samples).astype(np.int64, copy=False)
