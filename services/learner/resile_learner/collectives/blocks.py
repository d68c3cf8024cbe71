"""What is moved in a round: blocks of buckets, stages of a group, and the frames with them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from .frames import ROUND_PAYLOAD_BYTES, Kind, encode_content

WINDOW = 4
"""Blocks whose pieces a member sends to another ahead of their sums: what bounds the receiver's scratch memory."""

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


Ranks = tuple[int, ...]


class Edge(NamedTuple):
    """A step of a block on its way to its owner: ``child`` sends its pieces to ``parent``, which sends back the sum."""

    child: int
    parent: int
    ranks: Ranks
    """Those whose pieces they are: a group or a rack, of which ``child`` is one."""


class Sharing(NamedTuple):
    """How large buckets are exchanged: which ranks share memory, which are in one rack, and which own blocks."""

    groups: tuple[Ranks, ...] = ()
    """All ranks, by those that share memory, each with each other. Empty if all exchange everything with each other."""
    min_bytes: int = MIN_SHARED_BYTES
    slot_bytes: int = SLOT_BYTES
    owners: Ranks = ()
    """The ranks that own blocks of buckets that are cut, evenly many each; all ranks if empty."""
    racks: tuple[Ranks, ...] = ()
    """All ranks, by rack; a group is in one rack. Empty if racks make no difference."""

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

    def group_of(self, rank: int) -> Ranks:
        """The group of ``rank``."""
        return _by_rank(self.groups).get(rank, (rank,))

    def head(self, ranks: Ranks, owner: int) -> int:
        """The rank of a group or rack that folds the blocks of ``owner`` there. Those of others are divided evenly."""
        if owner in ranks:
            return owner
        return _spread(self.group_of(_spread(_able(ranks, self.owners), owner)), owner)

    def edges(self, rank: int, owner: int) -> Iterator[Edge]:
        """The steps with ``rank`` on the way of all pieces to ``owner``: from groups to the head of their rack, to it.

        Sums come back on the same way.
        """
        everyone = tuple(chain.from_iterable(self.groups))
        racks = self.racks or (everyone,)
        rack = _by_rank(racks)[rank]
        head = self.head(rack, owner)
        if rank == head:
            groups = dict.fromkeys(map(self.group_of, rack))
            yield from (Edge(child, head, group) for group in groups if (child := self.head(group, owner)) != head)
        elif rank == self.head(group := self.group_of(rank), owner):
            yield Edge(rank, head, group)
        if rank == owner:
            yield from (Edge(self.head(other, owner), owner, other) for other in racks if other != rack)
        elif rank == head:
            yield Edge(head, owner, rack)


@lru_cache(maxsize=16)
def _by_rank(divided: tuple[Ranks, ...]) -> Mapping[int, Ranks]:
    """Of each rank the ranks that it is among."""
    return {rank: ranks for ranks in divided for rank in ranks}


@lru_cache(maxsize=4096)
def _able(ranks: Ranks, owners: Ranks) -> Ranks:
    """Those of ``ranks`` that are not behind slow links; all of them if all are."""
    return tuple(sorted({*ranks}.intersection(owners))) or ranks


def _spread(ranks: Ranks, owner: int) -> int:
    """One of ``ranks`` for each owner that is none of them, in turns."""
    return ranks[(owner - sum(rank < owner for rank in ranks)) % len(ranks)]


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
    place: int
    """The number of blocks before it in the round, in the one order in which all ranks exchange them."""
    start: int
    stop: int
    """In elements of the bucket."""
    low: int
    high: int
    """The same in bytes."""
    owner: int
    shared: bool
    """Whether its owner sends the sum to the others; else everyone folds the whole bucket for itself."""

    @property
    def num_bytes(self) -> int:
        """Of one piece."""
        return self.high - self.low

    def content(self, kind: Kind, *, num_pieces: int = 1) -> bytes:
        """The second half of the header of a frame with this block."""
        return encode_content(kind, bucket=self.bucket, block=self.place, length=self.num_bytes * num_pieces)


class Part(NamedTuple):
    """The blocks of one owner in a stage: neighbours in their bucket."""

    stage: int
    """The number of stages before this one in the round."""
    offset: int
    """Where every segment keeps the pieces of its rank, in bytes, one after the other."""
    results: int
    """Where the segment of the head of the group keeps what it folds: its group's subtrees, and then the sum."""
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

    @property
    def low(self) -> int:
        """In bytes of the bucket."""
        return self.blocks[0].low


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
    num_bytes: int = 0
    """Of its payload."""
    turn: int = -1
    """Of pieces whose sum comes back: the number of those before them between the same two ranks; -1 of others."""


@dataclass(frozen=True)
class Route:
    """All frames with blocks that two members send each other in a round, each kind in its order."""

    pieces_out: list[Transfer] = field(default_factory=list)
    """PIECES and STAGED."""
    pieces_in: list[Transfer] = field(default_factory=list)
    sums_out: list[Transfer] = field(default_factory=list)
    """SUM: for each of the pieces with a turn that come, in their order."""
    sums_in: list[Transfer] = field(default_factory=list)
    folded_in: list[Transfer] = field(default_factory=list)
    """FOLDED: a head may have to wait for another's sums longer than for its own."""
