"""What one rank adds up in a round: its own partial sums and the pieces of others, in tree order.

The pieces of others were received into scratch memory, or lie in the segments of those that share memory.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from .blocks import NOT_SHARED, NUM_SLOTS, WINDOW, Block, Part, Shape, Sharing, Stage
from .folding import Folding
from .layout import layout, padded
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
        self.num_summed = [0] * len(spec.members)
        """For each rank how many of its shared blocks are known to be folded, since their sums are here."""
        self._spec = spec
        self._scratch = scratch
        self._segments = memory.segments
        self._num_folded = 0
        self._num_missing = list(self.layout.num_senders)
        num_stages = len(self.layout.stages)
        self._num_unstaged = [len(self.layout.partners)] * num_stages
        self._num_unfolded = list(self.layout.num_folders)
        self._num_unsummed = list(self.layout.num_inside)
        self._num_published = 0
        self._rooms_offset = self.layout.slot_bytes * self.layout.num_slots
        num_rooms = len(self.layout.inner.sources) if self.layout.partners else 0
        scratch.reserve(self._rooms_offset + self.layout.block_bytes * num_rooms)

    def push(self, bucket: int) -> None:
        """Take the partial sums of the next bucket."""
        is_direct = bucket in self.layout.direct
        self.buckets.append(Bucket(self._spec.partials[bucket], self._spec.sums[bucket], direct=is_direct))

    def has_room(self, block: Block) -> bool:
        """Whether others may already send their pieces of an own block."""
        return block.turn < self.num_summed[self.rank] + WINDOW

    def pieces_memory(self, block: Block, rank: int) -> memoryview:
        """Where the pieces that ``rank`` sends of an own block are received."""
        size = (block.high - block.low) * self._folding_of(block).counts[rank]
        return self._scratch.bytes_at(self._scratch_offset(block, rank), size)

    def sum_memory(self, block: Block) -> memoryview:
        """Where the sum of a block is received, and sent from."""
        return self.buckets[block.bucket].sums_bytes[block.low : block.high]

    def on_pieces(self, block: Block) -> None:
        """Another rank's pieces of an own block are here."""
        self._num_missing[block.place] -= 1

    def on_staged(self, stage: Stage) -> bool:
        """A partner's pieces of a stage lie in its segment; return whether those of all partners do."""
        self._num_unstaged[stage.number] -= 1
        return not self._num_unstaged[stage.number]

    def on_sum(self, block: Block, part: Part | None) -> None:
        """The sum of another's block is here; as its local owner leave it where the partners read it."""
        self.num_summed[block.owner] += 1
        self._leave_sum(block, part)

    def on_folded(self, stage: Stage, rank: int) -> None:
        """Read the sums of a stage from the segment of ``rank``."""
        bucket = self.buckets[stage.bucket]
        for part in stage.parts:
            if self.layout.local_owners[part.owner] == rank:
                sums = self._segments[rank].array_at(part.results, part.stop - part.start, bucket.dtype)
                bucket.sums[part.start : part.stop] = sums
                self.num_summed[part.owner] += len(part.blocks)
        self._num_unfolded[stage.number] -= 1

    def next_complete(self) -> Block | None:
        """The next own block, if all pieces of it are here. They are folded in their order, as the window demands."""
        if self._num_folded == len(self.layout.blocks):
            return None
        block = self.layout.blocks[self._num_folded]
        is_here = block.bucket < len(self.buckets) and not self._num_missing[block.place]
        return block if is_here and self.is_staged(self.layout.part_of[block.place]) else None

    def is_staged(self, part: Part | None) -> bool:
        """Whether all partners' pieces of a part can be read."""
        return part is None or not self._num_unstaged[part.stage]

    def can_stage(self) -> bool:
        """Whether the next stage's bucket is pushed, and its slot of the own segment is read."""
        number, stages = self.num_staged, self.layout.stages
        if number == len(stages) or stages[number].bucket >= len(self.buckets):
            return False
        return number < NUM_SLOTS or not self._num_unfolded[number - NUM_SLOTS]

    def stage(self) -> None:
        """Copy own pieces of the next stage to where the partners read them."""
        stage = self.layout.stages[self.num_staged]
        bucket = self.buckets[stage.bucket]
        segment = self._segments[self.rank]
        for part in stage.parts:
            if self.layout.local_owners[part.owner] != self.rank:
                length = part.stop - part.start
                for number, partial in enumerate(bucket.partials):
                    staged = segment.array_at(part.offset + number * part.num_bytes, length, bucket.dtype)
                    staged[:] = partial[part.start : part.stop]
        self.num_staged += 1

    def next_published(self) -> Stage | None:
        """The next stage all of whose sums, of the parts that are folded here, lie in the own segment; each once."""
        while self._num_published < len(self.layout.stages):
            number = self._num_published
            if self._num_unsummed[number]:
                return None
            self._num_published += 1
            if self.layout.num_inside[number]:
                return self.layout.stages[number]
        return None

    def fold(self, block: Block) -> None:
        """Add up all pieces of an own block in tree order; leave the sum where the partners read it, too."""
        bucket = self.buckets[block.bucket]
        part = self.layout.part_of[block.place]
        total = bucket.sums[block.start : block.stop]
        self._add_up(block, part, self._folding_of(block), [total])
        self._num_folded += 1
        self.num_summed[self.rank] += block.shared
        self._leave_sum(block, part)

    def outgoing(self, block: Block, part: Part | None) -> Sequence[bytes | memoryview]:
        """The pieces of another's block to send to it: as its local owner what remains of those of the group."""
        bucket = self.buckets[block.bucket]
        if not block.shared:
            return [bucket.own_pieces]
        if part is None:
            return [partial[block.low : block.high] for partial in bucket.partials_bytes]
        folding, length = self.layout.inner, block.stop - block.start
        num_results, size = len(folding.results), block.high - block.low
        offset = part.results + num_results * (block.low - part.blocks[0].low)
        segment = self._segments[self.rank]
        results = [segment.array_at(offset + number * size, length, bucket.dtype) for number in range(num_results)]
        self._add_up(block, part, folding, results)
        return [segment.bytes_at(offset, num_results * size)]

    def _folding_of(self, block: Block) -> Folding:
        return self.layout.own if block.bucket in self.layout.grouped else self.layout.flat

    def _leave_sum(self, block: Block, part: Part | None) -> None:
        """Copy a sum to where the partners read it."""
        if part is not None:
            bucket = self.buckets[block.bucket]
            offset = part.results + block.low - part.blocks[0].low
            left = self._segments[self.rank].array_at(offset, block.stop - block.start, bucket.dtype)
            left[:] = bucket.sums[block.start : block.stop]
            self._num_unsummed[part.stage] -= 1

    def _add_up(self, block: Block, part: Part | None, folding: Folding, results: Sequence[Array]) -> None:
        """Fold the pieces of a block into ``results``."""
        bucket = self.buckets[block.bucket]
        values, rooms = self._sources(block, part, folding)
        for source, result in folding.unchanged:
            is_there = bucket.in_place and part is None and folding.sources[source] == (self.rank, 0)
            if not is_there:
                results[result][:] = values[source]
        with np.errstate(all="ignore"):  # the training loop detects an overflow
            for step in folding.steps:
                room = rooms[step.left] if step.result is None else results[step.result]
                bucket.add(values[step.left], values[step.right], out=room)
                values[step.left] = room

    def _sources(self, block: Block, part: Part | None, folding: Folding) -> tuple[list[Array], list[Array]]:
        """The pieces of a block in the order of the leaves, and where sums in their places may be written.

        These are own partials, and the others' pieces from where they lie; a segment of another rank is only read.
        """
        bucket = self.buckets[block.bucket]
        length = block.stop - block.start
        values: list[Array] = []
        rooms: list[Array] = []
        next_room = self._rooms_offset
        for rank, number in folding.sources:
            if rank == self.rank:
                value = room = bucket.partials[number][block.start : block.stop]
            elif part is not None and rank in self._segments:
                offset = part.offset + number * part.num_bytes + block.low - part.blocks[0].low
                value = self._segments[rank].array_at(offset, length, bucket.dtype)
                room = self._scratch.array_at(next_room, length, bucket.dtype)
                next_room += self.layout.block_bytes
            else:
                offset = self._scratch_offset(block, rank) + number * (block.high - block.low)
                value = room = self._scratch.array_at(offset, length, bucket.dtype)
            values.append(value)
            rooms.append(room)
        return values, rooms

    def _scratch_offset(self, block: Block, rank: int) -> int:
        """Where the pieces that ``rank`` sends of an own block begin: those of all ranks lie side by side."""
        before = self._folding_of(block).first[rank]
        return block.scratch * self.layout.num_slots + padded(block.high - block.low) * before
