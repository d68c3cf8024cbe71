"""The header of a round: what each member sends to all others beside its gradients."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson
import torch
from torch import Tensor

from ..checkpoint.checkpoint_header import CheckpointHeader
from ..collectives.tree import Interval, children, fold_values
from ..state.memory import joined_bytes
from .buffers import Deltas
from .data.batches import Indices
from .stragglers import Pace
from .watch.repeatability import ShardFingerprint
from .watch.shard_values import Left

_LENGTH = struct.Struct("<I")
NO_INDICES: Indices = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class PartialSums:
    """One worker's sums over one complete subtree of shards: the small values that do not travel in buckets."""

    scalars: dict[str, float] = field(default_factory=dict)
    deltas: Deltas = field(default_factory=dict)


class ComputedShards(NamedTuple):
    """What a member computed for a round, in training or in validation."""

    partials: Sequence[PartialSums] = ()
    """The sums over each subtree that the member holds, left to right."""
    indices: Indices = NO_INDICES
    """The training samples that the member really fetched."""
    used: bytes = b""
    """For each trainable parameter, whether one of the member's shards gave it a gradient."""
    pace: Pace | None = None
    """What the member measured in an iteration; None in other rounds."""
    operations: tuple[str, ...] = ()
    """Operations without a deterministic form that the member knows of."""
    first_shard: ShardFingerprint | None = None
    """What the member made of shard 0, if it computed that for comparison."""
    left: Mapping[int, Left] = {}
    """What the member's shards have left in buffers without a rule."""
    late: Sequence[int] = ()
    """The buffers whose changes, too large for a header, a round that follows combines."""
    rows: bytes = b""
    """The outputs of the member's shards, or the gradients of their inputs, where the loop's body needs all of them."""


_NOT_COMPUTED = ComputedShards()


@dataclass(frozen=True, slots=True)
class RoundHeader:
    """One member's header."""

    digest: int
    """A rolling check of the member's parameters after the last commit."""
    checkpoint: CheckpointHeader
    computed: ComputedShards = _NOT_COMPUTED
    pause: bool = False
    """Whether the member's agent asked it to pause; one member is enough."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts that must be equal on all members."""
    is_new: bool = False
    """Whether the member has not been compared with the others yet: see `NewMembers`."""
    asks_for_boundary: bool = False
    """Whether the member has a change of membership, or a pause, to agree on when the iteration is over."""

    def encode(self, *, generation: int) -> bytes:
        """Encode as one JSON array with its length, then the raw arrays in order.

        ``generation`` is the highest that the member has formed.
        """
        partials, indices, used, pace, operations, first_shard, left, late, rows = self.computed
        names = next((list(partial.scalars) for partial in partials if partial.scalars), [])
        scalars = np.array([[partial.scalars[name] for name in names] for partial in partials], dtype=np.float64)
        touched = [list(partial.deltas) for partial in partials]
        checkpoint = self.checkpoint.to_json()
        own = [generation, self.digest, checkpoint, self.pause, self.facts, self.is_new, self.asks_for_boundary]
        numbers = (
            indices.astype(np.uint32) if len(indices) and 0 <= indices.min() <= indices.max() < 1 << 32 else indices
        )
        head = orjson.dumps(
            [
                *own,
                len(indices),
                numbers.itemsize,
                len(used),
                names,
                touched,
                pace and list(pace),
                operations,
                first_shard and list(first_shard),
                list(left.items()),
                list(late),
            ]
        )
        raw = joined_bytes(delta for partial in partials for delta in partial.deltas.values())
        return b"".join([_LENGTH.pack(len(head)), head, numbers.tobytes(), used, scalars.tobytes(), raw, rows])

    @staticmethod
    def decode(data: bytes, like: Callable[[int], Tensor]) -> "tuple[int, RoundHeader]":
        """Read what `encode` wrote: the generation and the header.

        ``like`` returns, for the number of a buffer, a tensor of its dtype and shape.
        """
        (length,) = _LENGTH.unpack_from(data)
        head: list[Any] = orjson.loads(data[_LENGTH.size : _LENGTH.size + length])
        generation, digest, checkpoint, pause, facts, is_new, asks_for_boundary, *computed_head = head
        num_indices, index_bytes, num_used, names, touched, pace, operations, first, left, late = computed_head
        reader = _Reader(data, _LENGTH.size + length)
        numbers = np.frombuffer(
            reader.read(index_bytes * num_indices), dtype=f"{'u' if index_bytes == 4 else 'i'}{index_bytes}"
        )
        indices = numbers.astype(np.int64, copy=False)
        used = reader.read(num_used)
        rows = np.frombuffer(reader.read(8 * len(names) * len(touched)), dtype=np.float64)
        partials = [
            PartialSums(
                scalars=dict(zip(names, row, strict=True)),
                deltas={index: reader.tensor(like(index)) for index in numbers},
            )
            for row, numbers in zip(rows.reshape(len(touched), len(names)).tolist(), touched, strict=True)
        ]
        computed = ComputedShards(
            partials,
            indices,
            used,
            Pace(*pace) if pace else None,
            tuple(operations),
            first and ShardFingerprint(*first),
            {index: (digest, proposed) for index, (digest, proposed) in left},
            tuple(late),
            reader.rest(),
        )
        stored = CheckpointHeader.from_json(checkpoint)
        return generation, RoundHeader(digest, stored, computed, pause, facts, is_new, asks_for_boundary)


@dataclass(frozen=True)
class Totals:
    """What all members computed for a round, summed up."""

    scalars: dict[str, float]
    deltas: Deltas
    used: list[bool]
    indices: Indices
    operations: frozenset[str]
    """Operations without a deterministic form that some member knows of."""

    @staticmethod
    def of(
        computed: Sequence[ComputedShards],
        pieces: Sequence[Sequence[Interval]],
        num_leaves: int,
        add: Callable[[Deltas, Deltas], Deltas],
    ) -> "Totals":
        """Fold the partial sums in the fixed tree; ``pieces[r]`` are the subtrees of rank r, ``add`` adds changes."""
        slots = [piece for held in pieces for piece in held]
        partials = [partial for each in computed for partial in each.partials]
        total = add_up(num_leaves, slots, [each.scalars for each in partials], add_scalars)
        deltas = add_up(num_leaves, slots, [dict(each.deltas) for each in partials], add)
        used = np.zeros(max(len(each.used) for each in computed), dtype=np.uint8)
        for each in computed:
            if each.used:
                used |= np.frombuffer(each.used, dtype=np.uint8)
        indices = np.concatenate([each.indices for each in computed])
        operations = frozenset(name for each in computed for name in each.operations)
        return Totals(total, deltas, used.astype(bool).tolist(), indices, operations)


Scalars = dict[str, float]
Value = TypeVar("Value", Scalars, Deltas)


def add_up(
    num_leaves: int, slots: Sequence[Interval], values: Sequence[Value], add: Callable[[Value, Value], Value]
) -> Value:
    """Fold the values of subtrees in tree order."""
    return fold_values(num_leaves, slots, values, add) if values else {}


def add_scalars(left: Scalars, right: Scalars) -> Scalars:
    """One addition of the tree."""
    return {name: value + right[name] for name, value in left.items()}


def fold_leaves(piece: Interval, of_leaf: Callable[[int], PartialSums]) -> PartialSums:
    """Fold the scalars of the single shards of one subtree."""
    if piece.hi - piece.lo == 1:
        return of_leaf(piece.lo)
    left, right = children(piece)
    return PartialSums(add_scalars(fold_leaves(left, of_leaf).scalars, fold_leaves(right, of_leaf).scalars))


class _Reader:
    """Reads raw arrays one after the other."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position

    def read(self, length: int) -> bytes:
        start, self._position = self._position, self._position + length
        return self._data[start : self._position]

    def rest(self) -> bytes:
        return self._data[self._position :]

    def tensor(self, like: Tensor) -> Tensor:
        raw = bytearray(self.read(like.numel() * like.element_size()))
        return torch.frombuffer(raw, dtype=like.dtype).view(like.shape) if raw else torch.empty_like(like, device="cpu")
