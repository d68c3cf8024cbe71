"""Reading the batches of a loop: a worker reads the rows of its own shards, where that is enough.

A loop's body gets whole batches. Their tensors are deferred: what this worker has not read, it reads when something
outside of divided calls first uses it, and from then on it reads whole batches.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
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


class _Part(NamedTuple):
    """Some rows of a batch, as they were read."""

    indices: Indices
    tensors: dict[str, Tensor]
    """By their place in the structure of the batch."""

    @classmethod
    def of(cls, fetched: Fetched) -> "_Part":
        """Return what was read."""
        return cls(fetched.indices, {keystr(path): leaf for path, leaf in tree_flatten_with_path(fetched.batch)[0]})

    @property
    def kind(self) -> str:
        """What all parts of a batch have in common, unless what is collated depends on all of its samples."""
        return repr(sorted((place, str(each.dtype), each.shape[1:]) for place, each in self.tensors.items()))

    def rows(self, rows: slice) -> "_Part":
        """Return some of these rows."""
        return _Part(self.indices[rows], {place: each[rows] for place, each in self.tensors.items()})


class OwnRows:
    """A batch of the samples with these ``indices``, of which this worker has read the rows ``held``, as ``fetched``.

    ``read`` reads others.
    """

    def __init__(self, indices: Indices, held: slice, fetched: Fetched, *, read: Callable[[Indices], Fetched]) -> None:
        self._planned = indices
        self._read = read
        own = _Part.of(fetched)
        self._parts = {(held.start, held.stop): own}
        """What was read, by its first row and the one after its last."""
        self._given: dict[str, Tensor] = {}
        """Tensors of the whole batch, from others."""
        self._deferred = {
            place: Deferred(_Leaf(self, place), (len(self), *each.shape[1:]), each.dtype, each.device)
            for place, each in own.tensors.items()
        }
        self.data = tree_unflatten(list(self._deferred.values()), tree_flatten(fetched.batch)[1])
        """What the body gets."""
        sizes = {place: each.nbytes // len(each) * len(self) for place, each in own.tensors.items()}
        self.sent = sorted(place for place, size in sizes.items() if size <= MAX_SENT_BYTES)
        """The places of the tensors that are sent, alike on all workers."""
        self.used_bytes = 0
        """The size of the batch, once something has used tensors of it that were not sent."""

    def __len__(self) -> int:
        return len(self._planned)

    def indices(self, rows: slice) -> Indices:
        """Return the indices of the samples that were really read for ``rows``."""
        return self._part(rows).indices

    def rows(self, place: str, rows: slice) -> Tensor:
        """Return rows of a tensor, which are read unless this worker has them."""
        return self._given[place][rows] if place in self._given else self._part(rows).tensors[place]

    def values(self, place: str) -> Tensor:
        """Return a tensor of the whole batch."""
        if place in self._given:
            return self._given[place]
        whole = self._whole()
        self.used_bytes = sum(each.nbytes for each in whole.tensors.values())
        return whole.tensors[place]

    def sent_of(self, rows: slice) -> list[Tensor]:
        """Return what other workers receive of some rows: a check of what they are, and those that are ``sent``."""
        part = self._part(rows)
        return [torch.tensor(crc32(part.kind.encode())), *(self.rows(place, rows) for place in self.sent)]

    def take(self, parts: Sequence[Sequence[Tensor]]) -> bool:
        """Take over what `sent_of` has returned for all rows, on the workers that have read them.

        False if they are of different kinds, so that the whole batch was read instead: PyTorch gives a tensor of
        numbers the type of the first one, or one for all of them.
        """
        kinds, *tensors = zip(*parts, strict=True) if parts else ([],)
        if len(set(map(int, kinds))) > 1:
            self._collate_whole()
            return False
        self._given |= {place: torch.cat(list(each)).cpu() for place, each in zip(self.sent, tensors, strict=True)}
        return True

    def _part(self, rows: slice) -> _Part:
        for (start, stop), part in self._parts.items():
            if start <= rows.start and rows.stop <= stop:
                return part.rows(slice(rows.start - start, rows.stop - start))
        part = self._parts[rows.start, rows.stop] = _Part.of(self._read(self._planned[rows]))
        return part

    def _whole(self) -> _Part:
        if (0, len(self)) in self._parts:
            return self._parts[0, len(self)]
        start, stop = next(iter(self._parts))
        pieces = [slice(0, start), slice(start, stop), slice(stop, len(self))]
        parts = [self._part(piece) for piece in pieces if piece.start < piece.stop]
        if len({part.kind for part in parts}) > 1:
            return self._collate_whole()
        tensors = {place: torch.cat([part.tensors[place] for part in parts]) for place in self._deferred}
        whole = _Part(np.concatenate([part.indices for part in parts]), tensors)
        self._parts = {(0, len(self)): whole}
        return whole

    def _collate_whole(self) -> _Part:
        """Read all samples together."""
        whole = _Part.of(self._read(self._planned))
        self._parts = {(0, len(self)): whole}
        self._given.clear()
        self.used_bytes = sum(each.nbytes for each in whole.tensors.values())
        for tensor in self._deferred.values():
            tensor.obtain()
        return whole


class _Leaf:
    """Where the values of one tensor of a batch are obtained."""

    has_rows = True

    def __init__(self, batch: OwnRows, place: str) -> None:
        self._batch = batch
        self._place = place

    def values(self, tensor: Deferred) -> Tensor:
        return self._batch.values(self._place)

    def rows(self, rows: slice) -> Tensor:
        return self._batch.rows(self._place, rows)


Read = tuple[Batch, WholeBatch | OwnRows]
"""A batch, and the samples of it that a worker has read."""


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
            dataset,
            seed=settings.seed,
            collate_fn=settings.collate_fn,
            num_workers=settings.num_workers,
            worker_init_fn=settings.worker_init_fn,
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

    def read(self, position: Position) -> Read:
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

    def read(self, position: Position) -> Read:
        """Read the next batch."""
        batch = self._shards.batch(position, _ALONE)
        return batch, WholeBatch(self._shards.read_again(batch, batch.rows(0)))

    def restart(self) -> None:
        """The next batch is another one than the one that follows."""

    def close(self, batch: WholeBatch | OwnRows) -> str:
        """There is nothing to tell the user."""
        return ""


_ALONE = View(generation=0, workers=(0,), me=0)


def _is_by_rows(fetched: Fetched) -> bool:
    leaves = tree_flatten(fetched.batch)[0]
    return all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(fetched.indices) for leaf in leaves)
