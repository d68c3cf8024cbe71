"""How one layout of buckets over members is cut: who folds which elements, in blocks of which size.

A bucket is cut into one segment for each rank, and a segment into blocks. Every member sends its pieces of a block to
the rank that folds it, and that rank sends the sum to everyone (reduce-scatter and all-gather). A bucket so small that
only the number of hops counts is one block that every rank folds for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .frames import ROUND_FRAME_BYTES
from .tree import Fold, Interval, folds

WINDOW = 4
"""Blocks of a segment whose pieces a member sends ahead of their sums: what bounds the receiver's scratch memory."""

CUT_ELEMENTS = 16
DIRECT_BYTES = 1 << 15
MAX_DIRECT_BYTES = 1 << 18
CACHE_BYTES = 1 << 19
MIN_BLOCK_BYTES = 1 << 14


class Shape(NamedTuple):
    """Length and element size of a bucket."""

    num_elements: int
    element_bytes: int


class Block(NamedTuple):
    """A part of a bucket that one rank folds at once."""

    bucket: int
    index: int
    """Which block of its bucket and rank this is."""
    start: int
    stop: int
    """In elements of the bucket."""
    low: int
    high: int
    """The same in bytes."""
    scratch: int
    """Where the folding rank's scratch memory keeps the others' pieces: an offset in bytes for a piece of one slot."""
    turn: int
    """The number of shared blocks before it in its rank's list, or -1 if everyone folds it alone."""

    @property
    def shared(self) -> bool:
        """Whether its rank sends the sum to the others."""
        return self.turn >= 0


@dataclass(frozen=True)
class Layout:
    """The cut of all buckets of a round."""

    counts: tuple[int, ...]
    """Pieces held by each rank."""
    first_slot: tuple[int, ...]
    """For each rank the slot of its first piece in the fold."""
    folds: tuple[Fold, ...]
    direct: frozenset[int]
    """Buckets that every rank folds for itself."""
    blocks: tuple[tuple[Block, ...], ...]
    """[rank]: what it folds, by bucket and index; pieces travel in this order."""
    sums: tuple[tuple[Block, ...], ...]
    """[rank]: those of its blocks whose sums travel."""
    slot_bytes: int
    """Scratch memory for the blocks of one slot of the fold."""


@lru_cache(maxsize=256)
def layout(pieces: tuple[tuple[Interval, ...], ...], num_leaves: int, shapes: tuple[Shape, ...]) -> Layout:
    """Cut buckets of these shapes for ranks that hold these pieces."""
    counts = tuple(map(len, pieces))
    slots = tuple(node for held in pieces for node in held)
    block_bytes = _block_bytes(counts)
    direct = _direct_buckets(shapes, counts)
    ranks = range(len(pieces))
    blocks = tuple(tuple(_blocks(rank, len(counts), shapes, direct, block_bytes)) if slots else () for rank in ranks)
    return Layout(
        counts=counts,
        first_slot=tuple(sum(counts[:rank]) for rank in ranks),
        folds=folds(num_leaves, slots),
        direct=direct,
        blocks=blocks,
        sums=tuple(tuple(block for block in own if block.shared) for own in blocks),
        slot_bytes=max((block.scratch + _padded(block.high - block.low) for own in blocks for block in own), default=0),
    )


def _block_bytes(counts: Sequence[int]) -> int:
    """A frame holds all pieces of one rank; the pieces of all ranks should stay in the cache until they are folded."""
    largest = ROUND_FRAME_BYTES // max(1, *counts)
    cached = CACHE_BYTES // max(1, sum(counts))
    return max(64, min(largest, max(MIN_BLOCK_BYTES, cached)) // 64 * 64)


def _direct_buckets(shapes: Sequence[Shape], counts: Sequence[int]) -> frozenset[int]:
    """The buckets that every rank folds for itself, as far as a bounded scratch memory allows."""
    chosen: set[int] = set()
    room = MAX_DIRECT_BYTES
    for bucket, shape in enumerate(shapes):
        size = shape.num_elements * shape.element_bytes
        if len(counts) > 1 and 0 < size <= DIRECT_BYTES and size * max(counts) <= ROUND_FRAME_BYTES and size <= room:
            chosen.add(bucket)
            room -= _padded(size)
    return frozenset(chosen)


def _blocks(
    rank: int, num_ranks: int, shapes: Sequence[Shape], direct: frozenset[int], block_bytes: int
) -> list[Block]:
    blocks: list[Block] = []
    turn = 0
    kept = WINDOW * block_bytes
    for bucket, shape in enumerate(shapes):
        if bucket in direct:
            size = shape.num_elements * shape.element_bytes
            blocks.append(Block(bucket, 0, 0, shape.num_elements, 0, size, scratch=kept, turn=-1))
            kept += _padded(size)
            continue
        first, last = _segment(shape.num_elements, rank, num_ranks)
        step = block_bytes // shape.element_bytes
        for index, start in enumerate(range(first, last, step)):
            stop = min(start + step, last)
            low, high = start * shape.element_bytes, stop * shape.element_bytes
            blocks.append(Block(bucket, index, start, stop, low, high, scratch=turn % WINDOW * block_bytes, turn=turn))
            turn += 1
    return blocks


def _segment(num_elements: int, rank: int, num_ranks: int) -> tuple[int, int]:
    units = -(-num_elements // CUT_ELEMENTS)
    return tuple(min(num_elements, units * edge // num_ranks * CUT_ELEMENTS) for edge in (rank, rank + 1))  # type: ignore[return-value]


def _padded(size: int) -> int:
    return -(-size // 64) * 64
