"""What is moved in a round: blocks of buckets, stages of a group, and the frames with them."""

from dataclasses import dataclass
from typing import NamedTuple

from .frames import ROUND_PAYLOAD_BYTES, Kind, encode_content

WINDOW = 4
"""Blocks of a segment whose pieces a member sends ahead of their sums: what bounds the receiver's scratch memory."""

CUT_ELEMENTS = 16
DIRECT_BYTES = 1 << 15
MAX_DIRECT_BYTES = 1 << 18


MIN_SHARED_BYTES = 512 << 10
"""The smallest bucket that is folded by group; sockets are as fast for smaller ones."""
NUM_SLOTS = 2
"""Stages that a segment holds at a time."""
SLOT_BYTES = 5 << 20
"""The pieces of a stage in a segment; as much is kept for results.

A bucket of 4 MiB is one stage among up to 8 workers: each stage costs each pair of workers four frames, and wakings.
"""


class Sharing(NamedTuple):
    """Which ranks exchange large buckets in shared memory, and which own blocks."""

    groups: tuple[tuple[int, ...], ...] = ()
    """All ranks, by those that share memory, each with each other. Empty if nobody does."""
    min_bytes: int = MIN_SHARED_BYTES
    slot_bytes: int = SLOT_BYTES
    owners: tuple[int, ...] = ()
    """The ranks that own blocks of buckets that are cut, evenly many each; all ranks if empty."""

    @property
    def stage_blocks(self) -> int:
        """Blocks in a stage, at most."""
        return max(1, self.slot_bytes // ROUND_PAYLOAD_BYTES)

    @property
    def segment_bytes(self) -> int:
        """What the segment of each rank holds."""
        return 2 * self.results_offset

    @property
    def results_offset(self) -> int:
        """Where its second half begins, in bytes: that for results."""
        return NUM_SLOTS * self.stage_blocks * ROUND_PAYLOAD_BYTES

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group of ``rank``."""
        return next((group for group in self.groups if rank in group), (rank,))

    def local_owner(self, group: tuple[int, ...], owner: int) -> int:
        """The rank of ``group`` that folds the blocks of ``owner`` inside. Other hosts' blocks are divided evenly."""
        if owner in group:
            return owner
        return group[(owner - sum(rank < owner for rank in group)) % len(group)]


NOT_SHARED = Sharing()


class Shape(NamedTuple):
    """Length and element size of a bucket."""

    num_elements: int
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of one piece."""
        return self.num_elements * self.element_bytes


class Block(NamedTuple):
    """A part of a bucket that one rank folds at once."""

    bucket: int
    number: int
    """Which block of its bucket and owner this is."""
    start: int
    stop: int
    """In elements of the bucket."""
    low: int
    high: int
    """The same in bytes."""
    scratch: int
    """Where the owner's scratch memory keeps the others' pieces: an offset in bytes for a piece of one slot."""
    turn: int
    """The number of shared blocks before it in its owner's list, or -1 if everyone folds it alone."""
    place: int
    """The number of blocks before it in its owner's list."""
    owner: int

    @property
    def shared(self) -> bool:
        """Whether its owner sends the sum to the others."""
        return self.turn >= 0

    def content(self, kind: Kind, *, num_pieces: int = 1) -> bytes:
        """The second half of the header of a frame with this block."""
        return encode_content(kind, bucket=self.bucket, block=self.number, length=(self.high - self.low) * num_pieces)


class Part(NamedTuple):
    """The blocks of one owner in a stage: neighbours in their bucket."""

    stage: int
    """The number of stages before this one in the round."""
    offset: int
    """Where every segment keeps the pieces of its rank, in bytes, one after the other."""
    results: int
    """Where the segment of the local owner keeps what it folds: its group's subtrees, and then the sum."""
    blocks: tuple[Block, ...]

    @property
    def owner(self) -> int:
        """Of its blocks."""
        return self.blocks[0].owner

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


class Stage(NamedTuple):
    """Blocks of a bucket that a group exchanges at once; the same for all groups."""

    bucket: int
    number: int
    """The number of stages before this one in the round."""
    parts: tuple[Part, ...]

    def content(self, kind: Kind) -> bytes:
        """The second half of the header of a frame about this stage."""
        return encode_content(kind, bucket=self.bucket, block=self.number)


class Transfer(NamedTuple):
    """A frame of a round that is known before it begins."""

    item: Block | Stage
    content: bytes
    """The second half of its header."""
    part: Part | None = None
    """Of a block that the receiver or the sender, its local owner, shares with its group."""


@dataclass(frozen=True)
class Route:
    """All frames with blocks that two members send each other in a round, each kind in its order."""

    pieces_out: tuple[Transfer, ...]
    """PIECES and STAGED."""
    pieces_in: tuple[Transfer, ...]
    sums_in: tuple[Transfer, ...]
    """SUM."""
    folded_in: tuple[Transfer, ...]
    """FOLDED: a local owner may have to wait for another's sums longer than for its own."""


NO_ROUTE = Route((), (), (), ())
