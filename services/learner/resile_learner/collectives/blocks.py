"""What is moved in a round: blocks of buckets, stages of a group, and the frames with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from .frames import ROUND_PAYLOAD_BYTES, Kind, WorkerGroups, encode_content

WINDOW = 4
"""A member sends another the pieces of at most this many blocks ahead of their sums: it bounds the scratch memory."""

CUT_ELEMENTS = 16
DIRECT_BYTES = 1 << 15
MAX_DIRECT_BYTES = 1 << 18


MIN_SHARED_BYTES = 512 << 10
"""The smallest bucket that is folded by group; sockets are as fast for smaller ones."""
NUM_STAGE_BUFFERS = 2
"""Number of stages that a segment holds at a time."""
STAGE_BYTES = 5 << 20
"""Bytes that a segment keeps for the pieces of one stage, and again for its results.

With up to 8 workers, a bucket of 4 MiB is one stage: each stage costs every pair of workers four frames and wake-ups.
"""


Ranks = tuple[int, ...]
Groups = tuple[Ranks, ...]


class Edge(NamedTuple):
    """A step of a block on its way to its owner: ``child`` sends its pieces to ``parent``, which sends back the sum."""

    child: int
    parent: int
    ranks: Ranks
    """The ranks whose pieces ``child`` sends: its group or rack, or itself alone."""


class Sharing(NamedTuple):
    """How large buckets are exchanged: which ranks share memory, which are in one rack, and which own blocks."""

    groups: Groups = ()
    """All ranks, divided into groups whose members all share memory. Empty: every rank exchanges with every other."""
    min_bytes: int = MIN_SHARED_BYTES
    stage_bytes: int = STAGE_BYTES
    owners: Ranks = ()
    """The ranks that own the blocks of cut buckets, in equal shares. Empty: all ranks own blocks."""
    racks: tuple[Ranks, ...] = ()
    """All ranks, divided by rack; each group is within one rack. Empty if racks make no difference."""

    @property
    def stage_blocks(self) -> int:
        """The maximum number of blocks in a stage."""
        return max(1, self.stage_bytes // ROUND_PAYLOAD_BYTES)

    @property
    def segment_bytes(self) -> int:
        """The size of each rank's segment in bytes."""
        return 2 * self.results_offset

    @property
    def results_offset(self) -> int:
        """The offset in bytes of a segment's second half, which is for results."""
        return NUM_STAGE_BUFFERS * self.stage_blocks * ROUND_PAYLOAD_BYTES

    def group_of(self, rank: int) -> Ranks:
        """The group of ``rank``."""
        return _by_rank(self.groups).get(rank, (rank,))

    def head(self, ranks: Ranks, owner: int) -> int:
        """The rank in a group or rack that folds blocks of ``owner``. Blocks of outside owners are divided evenly."""
        if owner in ranks:
            return owner
        return _spread(self.group_of(_spread(_able(ranks, self.owners), owner)), owner)

    def edges(self, rank: int, owner: int) -> Iterator[Edge]:
        """The steps of ``rank`` on the way of pieces to ``owner``: from a group to its rack's head, then to the owner.

        Sums come back the same way.
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

    @property
    def path(self) -> str:
        """Human-readable description of how sums travel."""
        if not self.groups:
            return "over TCP"
        sizes = [len(group) for group in self.groups]
        size = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        steps = []
        if len(sizes) == 1:
            steps.append("shared memory")
        elif max(sizes) > 1:
            steps.append(f"shared memory within {len(sizes)} groups of {size} workers")
            steps.append("one fold per group over TCP")
        if self.racks:
            steps.append(f"one fold per rack over TCP ({len(self.racks)} racks)")
        limit = f"for buckets of {self.min_bytes / 1024:.4g} KiB and more, TCP for smaller ones"
        return f"{' and '.join(steps)} {limit}"


def groups_among(members: Sequence[int], groups: WorkerGroups) -> Groups:
    """The ranks of ``members``, by group; empty if there are only single ranks."""
    group_of = {worker: group for group in groups for worker in group}
    among = {
        tuple(rank for rank, other in enumerate(members) if other in group_of.get(worker, (worker,)))
        for worker in members
    }
    return tuple(sorted(among)) if len(among) < len(members) else ()


def grown_groups(groups: Groups, mapped: Sequence[frozenset[int]]) -> Groups:
    """Join groups all of whose ranks have mapped each other's segments; empty if there are only single ranks."""
    grown: list[tuple[int, ...]] = []
    for group in groups or [(rank,) for rank in range(len(mapped))]:
        for number, other in enumerate(grown):
            if all(one in mapped[two] and two in mapped[one] for one in group for two in other):
                grown[number] = tuple(sorted(other + group))
                break
        else:
            grown.append(group)
    return tuple(grown) if len(grown) < len(mapped) else ()


@lru_cache(maxsize=16)
def _by_rank(divided: tuple[Ranks, ...]) -> Mapping[int, Ranks]:
    """Map each rank to its group or rack."""
    return {rank: ranks for ranks in divided for rank in ranks}


@lru_cache(maxsize=4096)
def _able(ranks: Ranks, owners: Ranks) -> Ranks:
    """The ranks among ``ranks`` that are not behind slow links; all of ``ranks`` if all are."""
    return tuple(sorted({*ranks}.intersection(owners))) or ranks


def _spread(ranks: Ranks, owner: int) -> int:
    """Return the rank that serves ``owner``, which is not in ``ranks``: owners are assigned in turn."""
    return ranks[(owner - sum(rank < owner for rank in ranks)) % len(ranks)]


NOT_SHARED = Sharing()


class Shape(NamedTuple):
    """Length and element size of a bucket."""

    num_elements: int
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size of one piece in bytes."""
        return self.num_elements * self.element_bytes


class Block(NamedTuple):
    """A part of a bucket that one rank folds at once."""

    bucket: int
    place: int
    """The number of blocks before this one in the round; all ranks exchange blocks in this order."""
    start: int
    stop: int
    """``start`` and ``stop`` are the limits of the block in elements of the bucket."""
    low: int
    high: int
    """``low`` and ``high`` are the limits of the block in bytes of the bucket."""
    owner: int
    shared: bool
    """Whether the owner sends the sum to the other ranks; otherwise every rank folds the whole bucket for itself."""

    @property
    def num_bytes(self) -> int:
        """Size of one piece in bytes."""
        return self.high - self.low

    def content(self, kind: Kind, *, num_pieces: int = 1) -> bytes:
        """The second half of the header of a frame with this block."""
        return encode_content(kind, bucket=self.bucket, block=self.place, length=self.num_bytes * num_pieces)


class Part(NamedTuple):
    """The blocks of one owner in a stage, which are adjacent in their bucket."""

    stage: int
    """The number of stages before this one in the round."""
    offset: int
    """Offset in bytes at which each segment keeps the pieces of its own rank, one after the other."""
    results: int
    """Offset in bytes, in the segment of the group's head, of what that folds: the group's subtrees, then the sum."""
    blocks: tuple[Block, ...]

    @property
    def owner(self) -> int:
        """The owner of the blocks."""
        return self.blocks[0].owner

    @property
    def start(self) -> int:
        """The start of this part in elements of the bucket."""
        return self.blocks[0].start

    @property
    def stop(self) -> int:
        """The end of this part in elements of the bucket."""
        return self.blocks[-1].stop

    @property
    def num_bytes(self) -> int:
        """Size of one piece in bytes."""
        return self.blocks[-1].high - self.blocks[0].low

    @property
    def low(self) -> int:
        """The start of this part in bytes of the bucket."""
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
    """A frame of a round, known before the round begins."""

    item: Block | Stage
    content: bytes
    """The second half of the frame's header."""
    num_bytes: int = 0
    """Size of the frame's payload in bytes."""
    sum_index: int = -1
    """For pieces whose sum comes back: the number of such frames before this one between the two ranks. Else -1."""


@dataclass(frozen=True)
class Route:
    """All frames with blocks that two members send each other in a round, each kind in its order."""

    pieces_out: list[Transfer] = field(default_factory=list)
    """PIECES and STAGED frames to the other member."""
    pieces_in: list[Transfer] = field(default_factory=list)
    sums_out: list[Transfer] = field(default_factory=list)
    """SUM frames to the other member: one for each of ``pieces_in`` that has a ``sum_index``, in the same order."""
    sums_in: list[Transfer] = field(default_factory=list)
    folded_in: list[Transfer] = field(default_factory=list)
    """FOLDED frames from the other member, in their own order: a head may wait longer for others' sums than its own."""
