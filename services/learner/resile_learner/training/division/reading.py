"""Reading the batches of a loop: a worker reads the rows of its own shards, where that is enough.

A loop's body gets whole batches. Their tensors are deferred: what this worker has not read, it reads when something
outside of divided calls first uses it, and from then on it reads whole batches.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import default_collate

from ...session import View
from ...state.facts import Facts
from ...state.run import Stateful
from ..data.batches import Batch, BatchPlan, Indices, Position
from ..data.fetch import Fetched, Fetcher, ShardKey
from ..data.ledger import Ledger
from ..data.sources import check_stream, plan_batches
from ..data.stream_shards import StreamShards
from ..seeds import seeded
from ..settings import TrainingSettings
from ..watch.repeatability import read_twice
from .deferred import Deferred

MAX_SENT_BYTES = 1 << 16
"""Tensors of a batch of at most that many bytes, such as labels, are sent to the workers that have not read them."""
NUM_CHECKED = 4
"""The number of samples that each worker reads twice at its start, to see whether they are the same."""
LARGE_BYTES = 1 << 20
"""A batch of that size is worth a line if every worker reads all of it."""


def plan_bodies(dataset: Any, settings: TrainingSettings) -> BatchPlan:
    """Plan the batches of an epoch as the loader of a plain loop has them. Raises UsageError."""
    num_shards = settings.num_shards and min(settings.num_shards, settings.batch_size)  # calls may have more rows
    return replace(plan_batches(dataset, replace(settings, num_shards=num_shards)), keeps_lone_sample=True)


def keys_from(plan: BatchPlan, position: Position) -> Iterator[ShardKey]:
    """The samples of each batch from ``position`` to the end of its epoch."""
    epoch = position.epoch
    while position.epoch == epoch:
        batch = plan.batch(position)
        yield ShardKey(epoch, batch.indices)
        position = batch.next


class WholeBatch:
    """A batch that this worker has read as a whole."""

    used_bytes = 0

    def __init__(self, fetched: Fetched) -> None:
        self.data = fetched.batch
        self._indices = fetched.indices

    def __len__(self) -> int:
        return len(self._indices)

    def indices(self, rows: slice) -> Indices:
        """Return the indices of the samples that were really read for ``rows``."""
        return self._indices[rows]


class OwnRows:
    """A batch of the samples with these ``indices``, of which this worker has read the rows ``held``, as ``fetched``.

    ``read`` reads others.
    """

    def __init__(self, indices: Indices, held: slice, fetched: Fetched, *, read: Callable[[Indices], Fetched]) -> None:
        self._planned = indices
        self._read = read
        leaves, spec = tree_flatten(fetched.batch)
        self._parts: dict[tuple[int, int], tuple[Indices, list[Tensor]]] = {
            (held.start, held.stop): (fetched.indices, leaves)
        }
        """What was read, by its first row and the one after its last."""
        self._given: dict[int, Tensor] = {}
        """Tensors of the whole batch, from others."""
        self.data = tree_unflatten([self._deferred(number, leaf) for number, leaf in enumerate(leaves)], spec)
        """What the body gets."""
        self.sent = [number for number, leaf in enumerate(leaves) if self._num_bytes(leaf) <= MAX_SENT_BYTES]
        """The numbers of the tensors that are sent, alike on all workers."""
        self.used_bytes = 0
        """The size of the batch, once something has used tensors of it that were not sent."""

    def __len__(self) -> int:
        return len(self._planned)

    def indices(self, rows: slice) -> Indices:
        """Return the indices of the samples that were really read for ``rows``."""
        return self._part(rows)[0]

    def rows(self, number: int, rows: slice) -> Tensor:
        """Return rows of tensor ``number``, which are read unless this worker has them."""
        return self._given[number][rows] if number in self._given else self._part(rows)[1][number]

    def values(self, number: int) -> Tensor:
        """Return tensor ``number`` of the whole batch."""
        if number in self._given:
            return self._given[number]
        self._read_whole()
        leaves = self._part(slice(0, len(self)))[1]
        self.used_bytes = sum(each.nbytes for each in leaves)
        return leaves[number]

    def give(self, number: int, values: Tensor) -> None:
        """Take over tensor ``number`` of the whole batch."""
        self._given[number] = values

    def _deferred(self, number: int, leaf: Tensor) -> Deferred:
        return Deferred(_Leaf(self, number), (len(self), *leaf.shape[1:]), leaf.dtype, leaf.device)

    def _num_bytes(self, leaf: Tensor) -> int:
        return leaf.nbytes // len(leaf) * len(self)

    def _part(self, rows: slice) -> tuple[Indices, list[Tensor]]:
        for (start, stop), (indices, leaves) in self._parts.items():
            if start <= rows.start and rows.stop <= stop:
                inside = slice(rows.start - start, rows.stop - start)
                return indices[inside], [leaf[inside] for leaf in leaves]
        fetched = self._read(self._planned[rows])
        part = self._parts[rows.start, rows.stop] = fetched.indices, tree_flatten(fetched.batch)[0]
        return part

    def _read_whole(self) -> None:
        start, stop = next(iter(self._parts))
        pieces = [slice(0, start), slice(start, stop), slice(stop, len(self))]
        indices, leaves = zip(*(self._part(piece) for piece in pieces if piece.start < piece.stop), strict=True)
        joined = [torch.cat(parts) for parts in zip(*leaves, strict=True)]
        self._parts = {(0, len(self)): (np.concatenate(indices), joined)}


class _Leaf:
    """Where the values of one tensor of a batch are obtained."""

    has_rows = True

    def __init__(self, batch: OwnRows, number: int) -> None:
        self._batch = batch
        self._number = number

    def values(self) -> Tensor:
        return self._batch.values(self._number)

    def rows(self, rows: slice) -> Tensor:
        return self._batch.rows(self._number, rows)


class DatasetBatches:
    """Reads the batches of a map-style dataset, as ``plan`` has them.

    ``held`` returns the rows of this worker's shards in a batch of some length, None if it has no other worker beside
    it. Only batches of PyTorch's own collate function are known to be by rows: another one may look at all samples.
    """

    def __init__(
        self, dataset: Any, plan: BatchPlan, settings: TrainingSettings, *, held: Callable[[int], slice | None]
    ) -> None:
        self.plan = plan
        self._num_samples = len(dataset)
        self._fetcher = Fetcher(
            dataset, seed=settings.seed, collate_fn=settings.collate_fn, num_workers=settings.num_workers
        )
        self._held = held
        self._stream: Iterator[Fetched] | None = None
        self._upcoming: deque[slice] = deque()
        """The rows of the batches that are being read ahead."""
        self._reads_whole = settings.collate_fn is not default_collate
        self._is_checked = False

    has_known_length = True
    parts: Mapping[str, Stateful] = MappingProxyType({})
    """Nothing belongs to the state of the run: the position determines what is read."""

    def ledger(self) -> Ledger:
        """A ledger for the samples of the dataset."""
        return Ledger(self._num_samples, self.plan.order)

    def facts(self) -> Facts:
        """Nothing to compare: the settings determine what a batch contains."""
        return {}

    def read(self, position: Position) -> tuple[Batch, WholeBatch | OwnRows]:
        """Read the next batch; readers go on through changes of membership, and end with the epoch."""
        batch = self.plan.batch(position)
        if not self._is_checked:
            self._is_checked = True
            few = ShardKey(batch.epoch, batch.indices[:NUM_CHECKED])
            read_twice(lambda: self._fetcher.read(few))
        if self._stream is None:
            self._stream = self._fetcher.stream(self._keys(position))
        fetched, rows = next(self._stream), self._upcoming.popleft()
        if batch.ends_epoch:
            self.restart()

        def read(indices: Indices) -> Fetched:
            with seeded(0):
                return self._fetcher.read(ShardKey(batch.epoch, indices))

        if self._held(len(batch.indices)) is not None and _is_by_rows(fetched):
            return batch, OwnRows(batch.indices, rows, fetched, read=read)
        if len(fetched.indices) == len(batch.indices):
            return batch, WholeBatch(fetched)
        self._reads_whole = True
        return batch, WholeBatch(read(batch.indices))

    def restart(self) -> None:
        """The next batch is another one than the one that follows: what was read ahead is discarded."""
        self._stream = None
        self._upcoming.clear()

    def close(self, batch: WholeBatch | OwnRows) -> str:
        """The iteration of ``batch`` is over; return what to tell the user."""
        if not batch.used_bytes or self._reads_whole:
            return ""
        self._reads_whole = True
        if batch.used_bytes < LARGE_BYTES:
            return ""
        return (
            f"the loop uses its batches, of {batch.used_bytes / (1 << 20):.1f} MiB, outside of the model: each worker "
            "reads all samples of a batch, instead of those of its own rows. To divide that, too, do it in the model, "
            "or in the dataset"
        )

    def _keys(self, position: Position) -> Iterator[ShardKey]:
        epoch = position.epoch
        while position.epoch == epoch:
            batch = self.plan.batch(position)
            rows = None if self._reads_whole else self._held(len(batch.indices))
            self._upcoming.append(rows or slice(0, len(batch.indices)))
            yield ShardKey(epoch, batch.indices[self._upcoming[-1]])
            position = batch.next


class StreamBatches:
    """Reads the batches of a stream, whole: every worker reads each sample."""

    has_known_length = False

    def __init__(self, stream: Any, settings: TrainingSettings, *, position: Callable[[], Position]) -> None:
        check_stream(drop_last=settings.drop_last, num_workers=settings.num_workers)
        self._shards = StreamShards(
            stream,
            batch_size=settings.batch_size,
            num_shards=1,
            seed=settings.seed,
            collate_fn=settings.collate_fn,
            position=position,
            is_fast=False,
            keeps_lone_sample=True,
        )

    @property
    def plan(self) -> BatchPlan:
        """The batches of an epoch, whose number is an estimate until one has ended."""
        return self._shards.plan

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """What belongs to the state of the run."""
        return self._shards.parts

    def ledger(self) -> Ledger:
        """A ledger for the samples of the stream, by their numbers in the epoch."""
        return self._shards.ledger()

    def facts(self) -> Facts:
        """Facts of the batch that was read last, which must be equal on all workers."""
        return self._shards.facts_of_batch()

    def read(self, position: Position) -> tuple[Batch, WholeBatch | OwnRows]:
        """Read the next batch."""
        batch = self._shards.batch(position, _ALONE)
        return batch, WholeBatch(self._shards.read_again(batch, 0))

    def restart(self) -> None:
        """The next batch is another one than the one that follows."""

    def close(self, batch: WholeBatch | OwnRows) -> str:
        """There is nothing to tell the user."""
        return ""


_ALONE = View(generation=0, workers=(0,), me=0)


def _is_by_rows(fetched: Fetched) -> bool:
    leaves = tree_flatten(fetched.batch)[0]
    return all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(fetched.indices) for leaf in leaves)
