"""What one rank adds up in a round: its own partial sums and the pieces of others, in tree order.

The pieces of others were received into scratch memory, or lie in the segments of those that share memory.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from .layout import NOT_SHARED, WINDOW, Block, Part, Shape, Sharing, layout
from .memory import Array, Bucket, Scratch
from .segments import Segment
from .spec import RoundSpec


class SharedMemory:
    """The segments that one round uses, by rank."""

    def __init__(self, sharing: Sharing = NOT_SHARED, segments: Mapping[int, Segment] | None = None) -> None:
        self.sharing = sharing
        self.segments = segments or {}
        """Of this rank and of its partners."""


class Reduction:
    """The memory of a round and the folds of its blocks."""

    def __init__(self, scratch: Scratch, spec: RoundSpec, rank: int, memory: SharedMemory) -> None:
        shapes = tuple(Shape(sums.numel(), sums.element_size()) for sums in spec.sums)
        self.rank = rank
        self.layout = layout(spec.pieces, spec.num_leaves, shapes, rank, memory.sharing)
        self.num_buckets = len(spec.sums)
        self.buckets: list[Bucket] = []
        """Those that are pushed."""
        self.num_staged = 0
        """Stages for which own pieces lie in the own segment."""
        self._spec = spec
        self._scratch = scratch
        self._segments = memory.segments
        partners = memory.sharing.partners
        senders = {other for other, count in enumerate(self.layout.counts) if count and other != rank}
        self.has_senders = bool(senders)
        """Whether other ranks hold pieces."""
        self._num_missing = [len(senders | partners if part else senders) for part in self.layout.part_of]
        self._num_folded_shared = 0
        scratch.reserve(self.layout.slot_bytes * sum(self.layout.counts))

    def push(self, bucket: int) -> None:
        """Take the partial sums of the next bucket."""
        is_direct = bucket in self.layout.direct
        self.buckets.append(Bucket(self._spec.partials[bucket], self._spec.sums[bucket], direct=is_direct))

    def has_room(self, block: Block) -> bool:
        """Whether others may already send their pieces of an own block."""
        return block.turn < self._num_folded_shared + WINDOW

    def pieces_memory(self, block: Block, rank: int) -> memoryview:
        """Where the pieces that ``rank`` holds of an own block are received."""
        num_bytes = (block.high - block.low) * self.layout.counts[rank]
        return self._scratch.bytes_at(self._scratch_offset(block, rank), num_bytes)

    def sum_memory(self, block: Block) -> memoryview:
        """Where the sum of a block is received, and sent from."""
        return self.buckets[block.bucket].sums_bytes[block.low : block.high]

    def count_pieces(self, block: Block) -> bool:
        """Count another rank's pieces of an own block as received; return whether they were the last."""
        self._num_missing[block.place] -= 1
        return self.is_complete(block)

    def is_complete(self, block: Block) -> bool:
        """Whether all other ranks' pieces of an own block are here."""
        return not self._num_missing[block.place]

    def stage(self) -> None:
        """Copy own pieces of the next stage to where each partner reads its part."""
        parts = self.layout.stages[self.num_staged]
        segment = self._segments[self.rank]
        for rank, part in parts.items():
            if rank != self.rank:
                bucket = self.buckets[part.bucket]
                length = part.stop - part.start
                for number, partial in enumerate(bucket.partials):
                    staged = segment.array_at(part.offset + number * part.num_bytes, length, bucket.dtype)
                    staged[:] = partial[part.start : part.stop]
        self.num_staged += 1

    def read_sums(self, part: Part, rank: int) -> None:
        """Copy the sums of a part of ``rank`` from its segment."""
        bucket = self.buckets[part.bucket]
        length = part.stop - part.start
        bucket.sums[part.start : part.stop] = self._segments[rank].array_at(part.offset, length, bucket.dtype)

    def fold(self, block: Block) -> None:
        """Add up all pieces of an own block in tree order; leave the sum where the partners read it, too."""
        self._num_folded_shared += block.shared
        bucket = self.buckets[block.bucket]
        total = bucket.sums[block.start : block.stop]
        part = self.layout.part_of[block.place]
        values, rooms = self._values(block, part, bucket)
        self._add_up(values, rooms, bucket, total)
        if part is not None:
            self._part_array(part, block, self.rank, 0, bucket)[:] = total

    def _add_up(self, values: list[Array], rooms: Sequence[Array], bucket: Bucket, total: Array) -> None:
        """Fold ``values`` into ``total``; ``rooms`` is where the sum in the place of each value may be written."""
        folds = self.layout.folds
        if not folds:
            if not bucket.in_place or values[0] is not rooms[0]:
                total[:] = values[0]
            return
        with np.errstate(all="ignore"):  # the training loop detects an overflow
            for left, right in folds[:-1]:
                bucket.add(values[left], values[right], out=rooms[left])
                values[left] = rooms[left]
            left, right = folds[-1]
            bucket.add(values[left], values[right], out=total)

    def _values(self, block: Block, part: Part | None, bucket: Bucket) -> tuple[list[Array], list[Array]]:
        """The pieces of a block in the order of the leaves, and where sums in their places may be written.

        These are own partials, and the others' pieces from where they lie; a segment of another rank is only read.
        """
        length = block.stop - block.start
        values: list[Array] = []
        rooms: list[Array] = []
        for rank, count in enumerate(self.layout.counts):
            if rank == self.rank:
                own = [partial[block.start : block.stop] for partial in bucket.partials]
            elif count:
                pieces = self._scratch.array_at(self._scratch_offset(block, rank), length * count, bucket.dtype)
                own = [pieces[at : at + length] for at in range(0, length * count, length)]
            else:
                continue
            rooms += own
            if part is not None and rank != self.rank and rank in self._segments:
                own = [self._part_array(part, block, rank, piece, bucket) for piece in range(count)]
            values += own
        return values, rooms

    def _part_array(self, part: Part, block: Block, rank: int, piece: int, bucket: Bucket) -> Array:
        """A block of a piece in the segment of ``rank``, or of the sum in the place of piece 0."""
        offset = part.offset + piece * part.num_bytes + block.low - part.blocks[0].low
        return self._segments[rank].array_at(offset, block.stop - block.start, bucket.dtype)

    def _scratch_offset(self, block: Block, rank: int) -> int:
        return self.layout.first_slot[rank] * self.layout.slot_bytes + self.layout.counts[rank] * block.scratch
