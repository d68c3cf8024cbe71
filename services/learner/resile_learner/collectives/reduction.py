"""What one rank adds up in a round: its own partial sums and the pieces of others, in tree order.

The pieces of others were received into scratch memory, or lie in the segments of those that share memory.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from .blocks import NOT_SHARED, NUM_STAGE_BUFFERS, Block, Shape, Sharing, Stage
from .bucket_memory import Array, Bucket, Scratch
from .layout import layout
from .segments import Segment
from .spec import RoundSpec
from .tree import Folding


class SharedMemory:
    """The segments that one round uses, by rank."""

    def __init__(self, sharing: Sharing = NOT_SHARED, segments: Mapping[int, Segment] | None = None) -> None:
        self.sharing = sharing
        self.segments = segments or {}
        """The segments of this rank and of its partners, by rank."""


class Reduction:
    """The memory of a round and the folds of its blocks."""

    def __init__(self, scratch: Scratch, spec: RoundSpec, rank: int, memory: SharedMemory) -> None:
        shapes = tuple(Shape(sums.numel(), sums.element_size()) for sums in spec.sums)
        self.rank = rank
        self.layout = layout(spec.pieces, spec.num_leaves, shapes, rank, memory.sharing)
        self.num_buckets = len(spec.sums)
        self.buckets: list[Bucket] = []
        """The buckets that were pushed so far."""
        self.num_staged = 0
        """Number of stages whose own pieces lie in the own segment."""
        self.summed: set[int] = set()
        """Places of the blocks whose sums are here."""
        self._spec = spec
        self._scratch = scratch
        self._segments = memory.segments
        self._num_folded = 0
        self._num_missing = dict(self.layout.num_senders)
        num_stages = len(self.layout.stages)
        self._num_unstaged = [len(self.layout.partners)] * num_stages
        self._num_unfolded = list(self.layout.num_folders)
        self._num_unsummed = list(self.layout.num_inside)
        self._num_published = 0
        num_rooms = sum(len(spec.pieces[partner]) for partner in self.layout.partners)
        scratch.reserve(self.layout.received_bytes + self.layout.block_bytes * num_rooms)

    def release_segments(self) -> None:
        """Stop using the segments: nothing is read from those of others any more."""
        self._segments = {}

    def push(self, bucket: int) -> None:
        """Take the partial sums of the next bucket."""
        is_direct = bucket in self.layout.direct
        spec = self._spec
        self.buckets.append(
            Bucket(spec.partials[bucket], spec.sums[bucket], direct=is_direct, is_maximum=bucket in spec.maxima)
        )

    def pieces_memory(self, block: Block, rank: int, num_bytes: int) -> memoryview:
        """Where the pieces that ``rank`` sends of a block are received."""
        return self._scratch.bytes_at(self.layout.received[block.place, rank], num_bytes)

    def sum_memory(self, block: Block) -> memoryview:
        """Where the sum of a block is received, and sent from."""
        return self.buckets[block.bucket].sums_bytes[block.low : block.high]

    def on_pieces(self, block: Block) -> None:
        """Another rank's pieces of a block are here."""
        self._num_missing[block.place] -= 1

    def on_staged(self, stage: Stage) -> bool:
        """A partner's pieces of a stage lie in its segment; return whether those of all partners do."""
        self._num_unstaged[stage.number] -= 1
        return not self._num_unstaged[stage.number]

    def on_sum(self, block: Block) -> None:
        """The sum of a block is here; copy it to where the partners read it, too."""
        self.summed.add(block.place)
        self._leave_sum(block)

    def on_folded(self, stage: Stage, rank: int) -> None:
        """Read the sums of a stage from the segment of ``rank``."""
        bucket = self.buckets[stage.bucket]
        for part in stage.parts:
            if self.layout.heads[part.owner] == rank:
                sums = self._segments[rank].array_at(part.results, part.stop - part.start, bucket.dtype)
                bucket.sums[part.start : part.stop] = sums
        self._num_unfolded[stage.number] -= 1

    def next_complete(self) -> Block | None:
        """The next own block, if all pieces of it are here."""
        if self._num_folded == len(self.layout.blocks):
            return None
        block = self.layout.blocks[self._num_folded]
        return block if block.bucket < len(self.buckets) and self.is_complete(block) else None

    def is_complete(self, block: Block) -> bool:
        """Whether all pieces of a block that this rank folds are here, or can be read."""
        part = self.layout.part_of.get(block.place)
        is_staged = part is None or not self._num_unstaged[part.stage]
        return is_staged and not self._num_missing.get(block.place)

    def can_stage(self) -> bool:
        """Whether the next stage's bucket is pushed, and its buffer in the own segment has been read by the others."""
        number, stages = self.num_staged, self.layout.stages
        if number == len(stages) or stages[number].bucket >= len(self.buckets):
            return False
        return number < NUM_STAGE_BUFFERS or not self._num_unfolded[number - NUM_STAGE_BUFFERS]

    def stage(self) -> None:
        """Copy own pieces of the next stage to where the partners read them."""
        stage = self.layout.stages[self.num_staged]
        bucket = self.buckets[stage.bucket]
        segment = self._segments[self.rank]
        for part in stage.parts:
            if self.layout.heads[part.owner] != self.rank:
                length = part.stop - part.start
                for number, partial in enumerate(bucket.partials):
                    staged = segment.array_at(part.offset + number * part.num_bytes, length, bucket.dtype)
                    staged[:] = partial[part.start : part.stop]
        self.num_staged += 1

    @property
    def has_read(self) -> bool:
        """Whether nothing is left to be read from the segments of others."""
        return self._num_folded == len(self.layout.blocks) and not any(self._num_unfolded)

    def next_published(self) -> Stage | None:
        """The next stage whose parts that are folded here have their sums in the own segment; each once."""
        while self._num_published < len(self.layout.stages):
            number = self._num_published
            if self._num_unsummed[number]:
                return None
            self._num_published += 1
            if self.layout.num_inside[number]:
                return self.layout.stages[number]
        return None

    def fold(self, block: Block) -> None:
        """Add up all pieces of an own block in tree order."""
        total = self.buckets[block.bucket].sums[block.start : block.stop]
        self._add_up(block, self._folding_of(block), [total])
        self._num_folded += 1
        if block.shared:
            self.on_sum(block)

    def outgoing(self, block: Block) -> Sequence[bytes | memoryview]:
        """The pieces of another rank's block to send; a head sends what remains of those of its group or rack."""
        bucket = self.buckets[block.bucket]
        if not block.shared:
            return [bucket.own_pieces]
        if block.bucket not in self.layout.grouped:
            return [partial[block.low : block.high] for partial in bucket.partials_bytes]
        folding = self._folding_of(block)
        part = self.layout.part_of.get(block.place)
        if part is None:
            self._add_up(block, folding, ())
            return [self._bytes_of(block, *folding.sources[source]) for source in folding.kept_in]
        length = block.stop - block.start
        num_results, size = len(folding.results), block.num_bytes
        offset = part.results + num_results * (block.low - part.low)
        segment = self._segments[self.rank]
        results = [segment.array_at(offset + number * size, length, bucket.dtype) for number in range(num_results)]
        self._add_up(block, folding, results)
        return [segment.bytes_at(offset, num_results * size)]

    def _folding_of(self, block: Block) -> Folding:
        return self.layout.by_owner[block.owner] if block.bucket in self.layout.grouped else self.layout.flat

    def _leave_sum(self, block: Block) -> None:
        """Copy a sum to where the partners read it."""
        part = self.layout.part_of.get(block.place)
        if part is not None:
            bucket = self.buckets[block.bucket]
            offset = part.results + block.low - part.low
            left = self._segments[self.rank].array_at(offset, block.stop - block.start, bucket.dtype)
            left[:] = bucket.sums[block.start : block.stop]
            self._num_unsummed[part.stage] -= 1

    def _add_up(self, block: Block, folding: Folding, results: Sequence[Array]) -> None:
        """Fold the pieces of a block into ``results``, or in place if ``results`` is empty."""
        bucket = self.buckets[block.bucket]
        part = self.layout.part_of.get(block.place)
        values, rooms = self._sources(block, folding)
        if results:
            for source, result in folding.unchanged:
                is_there = bucket.in_place and part is None and folding.sources[source] == (self.rank, 0)
                if not is_there:
                    results[result][:] = values[source]
        with np.errstate(all="ignore"):  # the training loop detects an overflow
            for step in folding.steps:
                room = results[step.result] if results and step.result is not None else rooms[step.left]
                bucket.add(values[step.left], values[step.right], out=room)
                values[step.left] = room

    def _sources(self, block: Block, folding: Folding) -> tuple[list[Array], list[Array]]:
        """The pieces of a block in the order of the leaves, and for each the memory where a sum may replace it.

        The pieces are own partials, and those of others where they lie; another rank's segment is only read.
        """
        bucket = self.buckets[block.bucket]
        part = self.layout.part_of.get(block.place)
        length = block.stop - block.start
        values: list[Array] = []
        rooms: list[Array] = []
        next_room = self.layout.received_bytes
        for rank, number in folding.sources:
            if rank == self.rank:
                value = room = bucket.partials[number][block.start : block.stop]
            elif part is not None and rank in self._segments:
                offset = part.offset + number * part.num_bytes + block.low - part.low
                value = self._segments[rank].array_at(offset, length, bucket.dtype)
                room = self._scratch.array_at(next_room, length, bucket.dtype)
                next_room += self.layout.block_bytes
            else:
                value = room = self._scratch.array_at(self._received_at(block, rank, number), length, bucket.dtype)
            values.append(value)
            rooms.append(room)
        return values, rooms

    def _bytes_of(self, block: Block, rank: int, number: int) -> memoryview:
        """A piece of a block that is an own partial, or was received."""
        if rank == self.rank:
            return self.buckets[block.bucket].partials_bytes[number][block.low : block.high]
        return self._scratch.bytes_at(self._received_at(block, rank, number), block.num_bytes)

    def _received_at(self, block: Block, rank: int, number: int) -> int:
        return self.layout.received[block.place, rank] + number * block.num_bytes
