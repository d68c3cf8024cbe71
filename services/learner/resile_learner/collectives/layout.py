"""How buckets are cut over the members of a round: which rank folds which elements, in blocks of which size.

A bucket is cut into one segment for each rank, and a segment into blocks. Every member sends its pieces of a block to
the rank that folds it, and that rank sends the sum to everyone (reduce-scatter and all-gather). A bucket so small that
only the number of hops counts is one block that every rank folds for itself.

Ranks that share memory exchange large buckets in stages. In a stage a member copies its pieces of several blocks of
each rank into a slot of its own segment, each rank folds its part straight from the others' segments, and leaves the
sums in its own, where the others read them. Blocks, and who folds them, are the same whatever carries them.
"""

from collections.abc import Iterable, Mapping, Sequence
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


MIN_SHARED_BYTES = 2 << 20
"""The smallest bucket that is exchanged in shared memory; sockets are as fast for smaller ones."""
NUM_SLOTS = 4
"""Stages that a segment holds at a time."""
SLOT_BYTES = 4 << 20
"""What a slot of a segment holds, unless many ranks share it."""


class Sharing(NamedTuple):
    """Which ranks exchange large buckets in shared memory, as one of them sees it."""

    group: tuple[int, ...] = ()
    """Those on its host, itself included, in rank order."""
    partners: frozenset[int] = frozenset()
    """Those of the group with which it does share memory."""
    min_bytes: int = MIN_SHARED_BYTES
    slot_bytes: int = SLOT_BYTES

    @property
    def part_blocks(self) -> int:
        """Blocks of one rank in a stage, at most. At least 2, so that no rank's part is empty."""
        return max(2, self.slot_bytes // (len(self.group) * ROUND_PAYLOAD_BYTES))

    @property
    def part_bytes(self) -> int:
        """Of a slot, for one rank."""
        return self.part_blocks * ROUND_PAYLOAD_BYTES

    @property
    def segment_bytes(self) -> int:
        """What the segment of each rank holds."""
        return NUM_SLOTS * len(self.group) * self.part_bytes


NOT_SHARED = Sharing()


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
    place: int
    """The number of blocks before it in its rank's list."""

    @property
    def shared(self) -> bool:
        """Whether its rank sends the sum to the others."""
        return self.turn >= 0

    def content(self, kind: Kind, *, num_pieces: int = 1) -> bytes:
        """The second half of the header of a frame with this block."""
        return encode_content(kind, bucket=self.bucket, block=self.number, length=(self.high - self.low) * num_pieces)


class Part(NamedTuple):
    """What one rank folds in one stage: neighbouring blocks of a bucket."""

    bucket: int
    number: int
    """Which part of its bucket and rank this is."""
    stage: int
    """The number of stages before this one in the round."""
    offset: int
    """Where every segment keeps it, in bytes: piece after piece, and the sum in the place of the first."""
    blocks: tuple[Block, ...]

    @property
    def start(self) -> int:
        """In elements of the bucket."""
        return self.blocks[0].start

    @property
    def stop(self) -> int:
        """In elements of the bucket."""
        return self.blocks[-1].stop

    @property
    def num_bytes(self) -> int:
        """Of one piece."""
        return self.blocks[-1].high - self.blocks[0].low

    def content(self, kind: Kind) -> bytes:
        """The second half of the header of a frame about this part."""
        return encode_content(kind, bucket=self.bucket, block=self.number)


class Transfer(NamedTuple):
    """A frame of a round that is known before it begins."""

    item: Block | Part
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
    blocks: tuple[Block, ...]
    """What this rank folds, by bucket and number."""
    part_of: tuple[Part | None, ...]
    """For each of these blocks the part that it belongs to, if it is shared with partners."""
    stages: tuple[dict[int, Part], ...]
    """For each stage the part of each partner and of this rank."""
    routes: tuple[Route, ...]
    """What is exchanged with each rank."""
    slot_bytes: int
    """Scratch memory for the blocks of one slot of the fold."""


@lru_cache(maxsize=64)
def layout(
    pieces: tuple[tuple[Interval, ...], ...],
    num_leaves: int,
    shapes: tuple[Shape, ...],
    rank: int,
    sharing: Sharing = NOT_SHARED,
) -> Layout:
    """Cut buckets of these shapes for ranks that hold these pieces."""
    counts = tuple(map(len, pieces))
    slots = tuple(node for held in pieces for node in held)
    block_bytes = _block_bytes(counts)
    direct = _direct_buckets(shapes, counts)
    ranks = range(len(pieces))
    blocks = [_blocks(other, len(counts), shapes, direct, block_bytes) if slots else [] for other in ranks]
    stages = _stages(blocks, shapes, direct, rank, sharing) if slots else ()
    return Layout(
        counts=counts,
        first_slot=tuple(sum(counts[:other]) for other in ranks),
        folds=folds(num_leaves, slots),
        direct=direct,
        blocks=tuple(blocks[rank]),
        part_of=_part_of(blocks[rank], [stage[rank] for stage in stages]),
        stages=stages,
        routes=tuple(
            _route(blocks, counts, rank, other, stages if other in sharing.partners else ()) for other in ranks
        ),
        slot_bytes=max((block.scratch + _padded(block.high - block.low) for own in blocks for block in own), default=0),
    )


def _route(
    blocks: Sequence[Sequence[Block]],
    counts: Sequence[int],
    rank: int,
    other: int,
    stages: Sequence[Mapping[int, Part]],
) -> Route:
    own, others = (_items(blocks[one], [stage[one] for stage in stages]) for one in (rank, other))
    return Route(pieces_out=_pieces(others, counts[rank]), pieces_in=_pieces(own, counts[other]), sums_in=_sums(others))


def _items(blocks: Sequence[Block], parts: Sequence[Part]) -> list[Block | Part]:
    """What a rank folds, with parts in the place of their blocks."""
    staged = {part.bucket for part in parts}
    items: list[Block | Part] = [*(block for block in blocks if block.bucket not in staged), *parts]
    return sorted(items, key=lambda item: (item.bucket, item.number))


def _pieces(items: Iterable[Block | Part], num_pieces: int) -> tuple[Transfer, ...]:
    """The frames with pieces; a rank without pieces announces a stage too, and so that it has read earlier ones."""
    return tuple(
        Transfer(item, item.content(Kind.STAGED))
        if isinstance(item, Part)
        else Transfer(item, item.content(Kind.PIECES, num_pieces=num_pieces))
        for item in items
        if num_pieces or isinstance(item, Part)
    )


def _sums(items: Iterable[Block | Part]) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(item, item.content(Kind.FOLDED if isinstance(item, Part) else Kind.SUM))
        for item in items
        if isinstance(item, Part) or item.shared
    )


def _stages(
    blocks: Sequence[Sequence[Block]],
    shapes: Sequence[Shape],
    direct: frozenset[int],
    rank: int,
    sharing: Sharing,
) -> tuple[dict[int, Part], ...]:
    """Cut the large buckets into stages, alike for all ranks of a group."""
    stages: list[dict[int, Part]] = []
    if not sharing.partners:
        return ()
    for bucket, (num_elements, element_bytes) in enumerate(shapes):
        if bucket in direct or not num_elements or num_elements * element_bytes < sharing.min_bytes:
            continue
        cut = [[block for block in own if block.bucket == bucket] for own in blocks]
        if not all(cut):
            continue
        num_parts = -(-max(map(len, cut)) // sharing.part_blocks)
        for number in range(num_parts):
            stage: dict[int, Part] = {}
            for position, other in enumerate(sharing.group):
                if other == rank or other in sharing.partners:
                    first, last = (len(cut[other]) * edge // num_parts for edge in (number, number + 1))
                    offset = (len(stages) % NUM_SLOTS * len(sharing.group) + position) * sharing.part_bytes
                    stage[other] = Part(bucket, number, len(stages), offset, tuple(cut[other][first:last]))
            stages.append(stage)
    return tuple(stages)


def _part_of(blocks: Sequence[Block], parts: Sequence[Part]) -> tuple[Part | None, ...]:
    found = {block.place: part for part in parts for block in part.blocks}
    return tuple(found.get(block.place) for block in blocks)


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
            blocks.append(Block(bucket, 0, 0, shape.num_elements, 0, high, scratch=kept, turn=-1, place=len(blocks)))
            kept += _padded(high)
            continue
        first, last = (_edge(shape.num_elements, edge, num_ranks) for edge in (rank, rank + 1))
        for number, start in enumerate(range(first, last, block_bytes // size)):
            stop = min(start + block_bytes // size, last)
            scratch = turn % WINDOW * block_bytes
            blocks.append(Block(bucket, number, start, stop, start * size, stop * size, scratch, turn, len(blocks)))
            turn += 1
    return blocks


def _edge(num_elements: int, rank: int, num_ranks: int) -> int:
    """Where the segment of ``rank`` begins."""
    units = -(-num_elements // CUT_ELEMENTS)
    return min(num_elements, units * rank // num_ranks * CUT_ELEMENTS)


def _padded(size: int) -> int:
    return -(-size // 64) * 64
