"""The order of an epoch that a sampler draws: the same on every worker, whenever it joins."""

import hashlib
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, Protocol

import numpy as np

from resile_shared.errors import UsageError

from ..seeds import mix
from .batch_samplers import BatchSampler, sampled_batches
from .batches import BatchPlan, Indices, default_num_shards
from .drawing import drawing

MAX_DRAWN = 100_000_000
"""The most samples that a sampler may draw in an epoch: each takes 8 bytes, several times over."""
KEPT_EPOCHS = 2
"""The orders of this many epochs are kept: the current one, and the next, which processes that read ahead ask for."""


class Sampler(Sized, Protocol):
    """Draws the indices of an epoch, as torch.utils.data.Sampler does."""

    def __iter__(self) -> Iterator[int]:
        """The indices of the next epoch."""


def planned(
    num_samples: int,
    batch_size: int,
    num_shards: int | None,
    *,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    sampler: Sampler | None,
    batch_sampler: BatchSampler | None = None,
    largest: int | None = None,
) -> BatchPlan:
    """The batches of epochs over a dataset of ``num_samples`` samples, in the order of a sampler if there is one.

    A batch sampler decides by itself how many samples each batch has. Raises UsageError.
    """
    if batch_sampler is not None:
        more = {"sampler": sampler, "drop_last": drop_last}
        return sampled_batches(batch_sampler, num_samples=num_samples, num_shards=num_shards, seed=seed, more=more)
    shards = default_num_shards(batch_size) if num_shards is None else num_shards
    if sampler is None:
        return BatchPlan(num_samples, batch_size, shards, seed, shuffle, drop_last, largest=largest)
    order = SamplerOrder(sampler, num_samples=num_samples, seed=seed)
    return BatchPlan(len(sampler), batch_size, shards, seed, drop_last=drop_last, order=order, largest=largest)


class SamplerOrder:
    """What ``sampler`` yields in each epoch, with all generators seeded by (``seed``, epoch).

    These are the global generators of python, numpy and torch, and the sampler's own ``generator``, if it has one, as
    torch's samplers do. ``set_epoch`` is called where there is one. Raises UsageError for a sampler that draws
    differently each time, and for indices that are not those of ``num_samples`` samples.
    """

    def __init__(self, sampler: Sampler, *, num_samples: int, seed: int) -> None:
        if not hasattr(sampler, "__len__"):
            raise UsageError(f"the sampler ({type(sampler).__name__}) has no length: give it __len__")
        if len(sampler) > MAX_DRAWN:
            raise UsageError(
                f"the sampler ({type(sampler).__name__}) draws {len(sampler):,} samples in an epoch, and at most "
                f"{MAX_DRAWN:,} are possible: let it draw fewer (num_samples), and train more epochs"
            )
        self._sampler: Any = sampler
        self._num_samples = num_samples
        self._seed = seed
        self._kept: dict[int, Indices] = {}
        if not np.array_equal(self._draw(0), self(0)):
            raise UsageError(
                f"the sampler ({type(sampler).__name__}) yields other indices each time it is asked for the same "
                "epoch, and workers would not use the same samples: let it draw from the global generators, from its "
                "own self.generator, or from the epoch that set_epoch(epoch) gets, and keep no state between epochs"
            )

    def __call__(self, epoch: int) -> Indices:
        """The indices of ``epoch``, in order."""
        if epoch not in self._kept:
            if len(self._kept) == KEPT_EPOCHS:
                del self._kept[next(iter(self._kept))]
            self._kept[epoch] = self._draw(epoch)
        return self._kept[epoch]

    def _draw(self, epoch: int) -> Indices:
        with drawing(self._sampler, mix(self._seed, "order", epoch), epoch):
            drawn = islice(self._sampler, len(self._sampler) + 1)  # it may have no end
            indices = np.fromiter(map(int, drawn), dtype=np.int64)
        self._check(indices, epoch)
        return indices

    def _check(self, indices: Indices, epoch: int) -> None:
        name, length = type(self._sampler).__name__, len(self._sampler)
        if len(indices) != length:
            found = f"more than {length}" if len(indices) > length else str(len(indices))
            raise UsageError(
                f"the sampler ({name}) yields {found} indices in epoch {epoch}, and its length is {length}: the "
                "number of iterations depends on it, so make them equal"
            )
        if length and not 0 <= indices.min() <= indices.max() < self._num_samples:
            raise UsageError(
                f"the sampler ({name}) yields indices from {indices.min()} to {indices.max()} in epoch {epoch}, and "
                f"the dataset has {self._num_samples} samples"
            )


def order_digest(plan: BatchPlan) -> str | None:
    """A digest of the first epoch that a sampler draws, to be compared with that of other workers."""
    if plan.order is None:
        return None
    return hashlib.sha256(plan.order(0).tobytes() + plan.ends(0).tobytes()).hexdigest()
