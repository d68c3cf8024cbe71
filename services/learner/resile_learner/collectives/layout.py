"""How buckets are cut over the members of a round: which rank folds which elements, in blocks of which size.

A bucket is cut into one segment for each rank, and a segment into blocks. Every member sends its pieces of a block to
the rank that folds it, and that rank sends the sum to everyone (reduce-scatter and all-gather). A bucket so small that
only the number of hops counts is one block that every rank folds for itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .frames import ROUND_PAYLOAD_BYTES, Kind, encode_content
from .tree import Fold, Interval, folds

WINDOW = 4
"""Blocks of a segment whose pieces a member sends ahead of their sums: what bounds the receiver's scratch memory."""

CUT_ELEMENTS = 16
DIRECT_BYTES = 1 << 15
MAX_DIRECT_BYTES = 1 << 18


class Shape(NamedTuple):
    """Length and element size of a bucket."""

    num_elements: int
    element_bytes: int


class Block(NamedTuple):
    """A part of a bucket that one rank folds at once."""

    bucket: int
    number: int
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

    def content(self, kind: Kind, *, num_pieces: int = 1) -> bytes:
        """The second half of the header of a frame with this block."""
        return encode_content(kind, bucket=self.bucket, block=self.number, length=(self.high - self.low) * num_pieces)


class Transfer(NamedTuple):
    """A frame of a round that is known before it begins."""

    block: Block
    content: bytes
    """The second half of its header."""


@dataclass(frozen=True)
class Route:
    """All frames with blocks that two members send each other in a round, in their order."""

    pieces_out: tuple[Transfer, ...]
    pieces_in: tuple[Transfer, ...]
    sums_in: tuple[Transfer, ...]


@dataclass(frozen=True)
class Layout:
    """The cut of all buckets of a round as one rank sees it."""

    counts: tuple[int, ...]
    """Pieces held by each rank."""
    first_slot: tuple[int, ...]
    """For each rank the slot of its first piece in the fold."""
    folds: tuple[Fold, ...]
    direct: frozenset[int]
    """Buckets that every rank folds for itself."""
    blocks: tuple[Transfer, ...]
    """What this rank folds, by bucket and number, with the header of the sum."""
    routes: tuple[Route, ...]
    """What is exchanged with each rank."""
    slot_bytes: int
    """Scratch memory for the blocks of one slot of the fold."""


@lru_cache(maxsize=64)
def layout(pieces: tuple[tuple[Interval, ...], ...], num_leaves: int, shapes: tuple[Shape, ...], rank: int) -> Layout:
    """Cut buckets of these shapes for ranks that hold these pieces."""
    counts = tuple(map(len, pieces))
    slots = tuple(node for held in pieces for node in held)
    block_bytes = _block_bytes(counts)
    direct = _direct_buckets(shapes, counts)
    ranks = range(len(pieces))
    blocks = [_blocks(other, len(counts), shapes, direct, block_bytes) if slots else [] for other in ranks]
    return Layout(
        counts=counts,
        first_slot=tuple(sum(counts[:other]) for other in ranks),
        folds=folds(num_leaves, slots),
        direct=direct,
        blocks=_sums(blocks[rank]),
        routes=tuple(
            Route(
                pieces_out=_pieces(blocks[other], counts[rank]),
                pieces_in=_pieces(blocks[rank], counts[other]),
                sums_in=_sums(block for block in blocks[other] if block.shared),
            )
            for other in ranks
        ),
        slot_bytes=max((block.scratch + _padded(block.high - block.low) for own in blocks for block in own), default=0),
    )


def _pieces(blocks: Iterable[Block], num_pieces: int) -> tuple[Transfer, ...]:
    if not num_pieces:
        return ()
    return tuple(Transfer(block, block.content(Kind.PIECES, num_pieces=num_pieces)) for block in blocks)


def _sums(blocks: Iterable[Block]) -> tuple[Transfer, ...]:
    return tuple(Transfer(block, block.content(Kind.SUM)) for block in blocks)


def _block_bytes(counts: Sequence[int]) -> int:
    """The size at which a frame holds all pieces of any rank."""
    return max(64, ROUND_PAYLOAD_BYTES // max(1, *counts) // 64 * 64)


def _direct_buckets(shapes: Sequence[Shape], counts: Sequence[int]) -> frozenset[int]:
    """The buckets that every rank folds for itself, as far as a bounded scratch memory allows."""
    chosen: set[int] = set()
    room = MAX_DIRECT_BYTES
    for bucket, shape in enumerate(shapes):
        size = shape.num_elements * shape.element_bytes
        if len(counts) > 1 and 0 < size <= DIRECT_BYTES and size * max(counts) <= ROUND_PAYLOAD_BYTES and size <= room:
            chosen.add(bucket)
            room -= _padded(size)
    return frozenset(chosen)


def _blocks(
    rank: int, num_ranks: int, shapes: Sequence[Shape], direct: frozenset[int], block_bytes: int
) -> list[Block]:
    """What ``rank`` folds."""
    blocks: list[Block] = []
    turn = 0
    kept = WINDOW * block_bytes
    for bucket, shape in enumerate(shapes):
        size = shape.element_bytes
        if bucket in direct:
            high = shape.num_elements * size
            blocks.append(Block(bucket, 0, 0, shape.num_elements, 0, high, scratch=kept, turn=-1))
            kept += _padded(high)
            continue
        first, last = (_edge(shape.num_elements, edge, num_ranks) for edge in (rank, rank + 1))
        for number, start in enumerate(range(first, last, block_bytes // size)):
            stop = min(start + block_bytes // size, last)
            scratch = turn % WINDOW * block_bytes
            blocks.append(Block(bucket, number, start, stop, start * size, stop * size, scratch, turn))
            turn += 1
    return blocks


def _edge(num_elements: int, rank: int, num_ranks: int) -> int:
    """Where the segment of ``rank`` begins."""
    units = -(-num_elements // CUT_ELEMENTS)
    return min(num_elements, units * rank // num_ranks * CUT_ELEMENTS)


def _padded(size: int) -> int:
    return -(-size // 64) * 64
