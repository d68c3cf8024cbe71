"""What one rank adds up in a round: its own partial sums and the pieces that others have sent, in tree order."""

from collections.abc import Sequence

import numpy as np

from .layout import WINDOW, Block, Shape, layout
from .memory import Array, Bucket, Scratch
from .spec import RoundSpec


class Reduction:
    """The memory of a round and the folds of its blocks."""

    def __init__(self, scratch: Scratch, spec: RoundSpec, rank: int) -> None:
        shapes = tuple(Shape(sums.numel(), sums.element_size()) for sums in spec.sums)
        self.rank = rank
        self.layout = layout(spec.pieces, spec.num_leaves, shapes, rank)
        self.num_buckets = len(spec.sums)
        self.buckets: list[Bucket] = []
        """Those that are pushed."""
        self._spec = spec
        self._scratch = scratch
        num_senders = sum(1 for other, count in enumerate(self.layout.counts) if count and other != rank)
        self.has_senders = num_senders > 0
        """Whether other ranks hold pieces."""
        self._num_missing = [num_senders] * len(self.layout.blocks)
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

    def count_pieces(self, number: int) -> bool:
        """Count another rank's pieces of own block ``number`` as received; return whether they were the last."""
        self._num_missing[number] -= 1
        return not self._num_missing[number]

    def fold(self, block: Block) -> None:
        """Add up all pieces of an own block in tree order."""
        self._num_folded_shared += block.shared
        bucket, folds = self.buckets[block.bucket], self.layout.folds
        values = self._values(block, bucket)
        total = bucket.sums[block.start : block.stop]
        if not folds:
            if not bucket.in_place:
                total[:] = values[0]
            return
        with np.errstate(all="ignore"):  # the training loop detects an overflow
            for left, right in folds[:-1]:
                bucket.add(values[left], values[right], out=values[left])
            left, right = folds[-1]
            bucket.add(values[left], values[right], out=total)

    def _values(self, block: Block, bucket: Bucket) -> Sequence[Array]:
        """The pieces of a block in the order of the leaves: own partials, and the others' in the scratch memory."""
        length = block.stop - block.start
        values: list[Array] = []
        for rank, count in enumerate(self.layout.counts):
            if rank == self.rank:
                values += [partial[block.start : block.stop] for partial in bucket.partials]
            elif count:
                pieces = self._scratch.array_at(self._scratch_offset(block, rank), length * count, bucket.dtype)
                values += [pieces[at : at + length] for at in range(0, length * count, length)]
        return values

    def _scratch_offset(self, block: Block, rank: int) -> int:
        return self.layout.first_slot[rank] * self.layout.slot_bytes + self.layout.counts[rank] * block.scratch
