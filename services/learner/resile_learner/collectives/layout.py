"""How buckets are cut over the members of a round: which rank folds which elements, in blocks of what size.

A bucket is cut into one segment for each rank, its owner, and a segment into blocks. Every member sends its pieces of a
block to the owner, which folds them and sends the sum to every rank (reduce-scatter and all-gather). Ranks behind slow
links own nothing. A bucket so small that only the number of hops counts is one block that every rank folds for itself.

Ranks that share memory are a group. They fold a large bucket by group: inside a group one rank, the head of the group
for a block, folds the pieces of all, and only the subtrees that remain leave it. A rank that shares memory with no
other is a group of its own. Racks are groups of groups: the head of a rack folds what the heads of its groups send, and
only what then remains goes to the block's owner. The sum comes back the same way. The owner is the head of its own
group and rack. Blocks, their owners and the tree do not depend on what carries the pieces or which rank adds them.

Inside a group blocks are exchanged in stages. In a stage a member copies its pieces of several blocks into a part of
its own segment, the heads fold straight from the others' segments, and leave the sums in their own, where the others
read them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from .blocks import (
    CUT_ELEMENTS,
    DIRECT_BYTES,
    MAX_DIRECT_BYTES,
    NOT_SHARED,
    NUM_STAGE_BUFFERS,
    WINDOW,
    Block,
    Edge,
    Part,
    Ranks,
    Route,
    Shape,
    Sharing,
    Stage,
    Transfer,
)
from .frames import ROUND_PAYLOAD_BYTES, Kind
from .tree import Folding, Interval, folding


@dataclass(frozen=True)
class Layout:
    """The cut of all buckets of a round as one rank sees it."""

    direct: frozenset[int]
    """Buckets that every rank folds for itself."""
    grouped: frozenset[int]
    """Buckets that are folded by group."""
    blocks: tuple[Block, ...]
    """Blocks that this rank owns."""
    flat: Folding
    """Folding of an own block whose pieces every rank sends directly."""
    by_owner: Mapping[int, Folding]
    """Folding of blocks that are folded by group, by owner, for the owners for which this rank is a head."""
    num_senders: Mapping[int, int]
    """Number of frames with pieces that this rank receives for a block, by place of the block, if there are any."""
    part_of: Mapping[int, Part]
    """The part that a block belongs to, by place of the block; only for blocks that are shared with partners."""
    stages: tuple[Stage, ...]
    num_folders: tuple[int, ...]
    """For each stage, the number of partners that are the head of the group for one of its parts."""
    num_inside: tuple[int, ...]
    """For each stage, the number of blocks for which this rank is the head of the group."""
    partners: frozenset[int]
    """The other ranks of this rank's group."""
    heads: tuple[int, ...]
    """The head of this rank's group for the blocks of each owner, by the owner's rank."""
    routes: tuple[Route, ...]
    """The frames that this rank exchanges with each rank."""
    received: Mapping[tuple[int, int], int]
    """Offset in bytes in the scratch memory where pieces are received, by place of the block and rank of the sender."""
    received_bytes: int
    """Size in bytes of the scratch memory for received pieces."""
    block_bytes: int
    """Maximum size in bytes of a block of a bucket that is cut."""


@lru_cache(maxsize=64)
def layout(
    pieces: tuple[tuple[Interval, ...], ...],
    num_leaves: int,
    shapes: tuple[Shape, ...],
    rank: int,
    sharing: Sharing = NOT_SHARED,
) -> Layout:
    """Cut buckets of these shapes for ranks that hold these pieces."""
    return _Cut(pieces, num_leaves, shapes, sharing).seen_by(rank)


class _Cut:
    """The cut of all buckets of a round, the same for all ranks."""

    def __init__(
        self,
        pieces: tuple[tuple[Interval, ...], ...],
        num_leaves: int,
        shapes: tuple[Shape, ...],
        sharing: Sharing,
    ) -> None:
        self.pieces = pieces
        self.num_leaves = num_leaves
        self.sharing = sharing
        self.ranks = range(len(pieces))
        self.remaining: dict[Ranks, tuple[Interval, ...]] = {(rank,): held for rank, held in enumerate(pieces)}
        """For each set of ranks whose pieces are folded together, the subtrees that remain."""
        for ranks in (*sharing.groups, *sharing.racks):
            self.remaining[ranks] = self._folding({rank: (rank,) for rank in ranks}).results
        most = max(map(len, self.remaining.values()))
        self.block_bytes = max(64, ROUND_PAYLOAD_BYTES // max(1, most) // 64 * 64)
        self.direct = _direct_buckets(shapes, most) if len(pieces) > 1 else frozenset()
        self.grouped = frozenset(
            bucket
            for bucket, shape in enumerate(shapes)
            if bucket not in self.direct and sharing.groups and shape.num_bytes >= max(1, sharing.min_bytes)
        )
        self.blocks = tuple(self._blocks(shapes)) if any(pieces) else ()
        self.stages = tuple(self._stages())

    def seen_by(self, rank: int) -> Layout:
        group = self.sharing.group_of(rank)
        partners = frozenset(group) - {rank}
        stages = self.stages if partners else ()
        heads = tuple(self.sharing.head(group, owner) for owner in self.ranks)
        edges = [[*self.sharing.edges(rank, owner)] if self.grouped else [] for owner in self.ranks]
        routes = self._routes(rank, partners, edges)
        received, received_bytes = _scratch_of(routes)
        folders = [[heads[part.owner] for part in stage.parts] for stage in stages]
        for stage, inside in zip(stages, folders, strict=True):
            for partner in partners.intersection(inside):
                routes[partner].folded_in.append(Transfer(stage, stage.content(Kind.FOLDED)))
        return Layout(
            direct=self.direct,
            grouped=self.grouped,
            blocks=tuple(block for block in self.blocks if block.owner == rank),
            flat=self._folding({sender: (sender,) for sender in self.ranks}),
            by_owner={
                owner: self._folding(
                    {partner: (partner,) for partner in group}
                    | {edge.child: edge.ranks for edge in edges[owner] if edge.parent == rank}
                )
                for owner, head in enumerate(heads)
                if head == rank
            },
            num_senders=Counter(place for place, _ in received),
            part_of={block.place: part for stage in stages for part in stage.parts for block in part.blocks},
            stages=stages,
            num_folders=tuple(len({*inside} - {rank}) for inside in folders),
            num_inside=tuple(
                sum(len(part.blocks) for part, folder in zip(stage.parts, inside, strict=True) if folder == rank)
                for stage, inside in zip(stages, folders, strict=True)
            ),
            partners=partners,
            heads=heads,
            routes=routes,
            received=received,
            received_bytes=received_bytes,
            block_bytes=self.block_bytes,
        )

    def _folding(self, given: Mapping[int, Ranks]) -> Folding:
        """The folding of what ranks send: each sends what remains of the pieces of the ranks in ``given[rank]``."""
        return folding(
            self.num_leaves, tuple(self.remaining[given[rank]] if rank in given else () for rank in self.ranks)
        )

    def _routes(self, rank: int, partners: frozenset[int], edges: Sequence[Sequence[Edge]]) -> tuple[Route, ...]:
        """The frames between ``rank`` and every other rank; ``edges`` are its edges in a grouped bucket, by owner.

        Every rank sends a frame for its pieces, even if it has none. So the owner waits for it, and no sum reaches a
        group before its members have announced the stage.
        """
        routes = tuple(Route() for _ in self.ranks)
        items: list[Block | Stage] = [*self.blocks, *self.stages]
        for item in sorted(items, key=lambda item: item.bucket):
            if isinstance(item, Stage):
                for partner in partners:
                    for transfers in (routes[partner].pieces_out, routes[partner].pieces_in):
                        transfers.append(Transfer(item, item.content(Kind.STAGED)))
                continue
            is_grouped = item.bucket in self.grouped
            for edge in edges[item.owner] if is_grouped else _flat_edges(rank, item.owner, self.ranks):
                num_pieces = len(self.remaining[edge.ranks])
                if edge.child == rank:
                    _add(item, num_pieces, routes[edge.parent].pieces_out, routes[edge.parent].sums_in)
                else:
                    _add(item, num_pieces, routes[edge.child].pieces_in, routes[edge.child].sums_out)
        return routes

    def _stages(self) -> Iterator[Stage]:
        """Cut buckets that are folded by group into stages of evenly many blocks, which all ranks fold in parallel."""
        most = self.sharing.stage_blocks
        number = 0
        for bucket in sorted(self.grouped):
            blocks = [block for block in self.blocks if block.bucket == bucket]
            num_stages = -(-len(blocks) // most)
            for cut in range(num_stages):
                first, last = (len(blocks) * edge // num_stages for edge in (cut, cut + 1))
                yield Stage(bucket, number, tuple(self._parts(blocks[first:last], number)))
                number += 1

    def _parts(self, blocks: Sequence[Block], stage: int) -> Iterator[Part]:
        """The blocks of a stage by owner."""
        offset = stage % NUM_STAGE_BUFFERS * self.sharing.stage_blocks * ROUND_PAYLOAD_BYTES
        for _, own in groupby(sorted(blocks, key=lambda block: (block.owner, block.place)), lambda block: block.owner):
            part = Part(stage, offset, offset + self.sharing.results_offset, tuple(own))
            offset += len(part.blocks) * ROUND_PAYLOAD_BYTES
            yield part

    def _blocks(self, shapes: Sequence[Shape]) -> Iterator[Block]:
        """All blocks in order: for each bucket the first block of each owner, then the second of each, and so on."""
        place = 0
        for bucket, shape in enumerate(shapes):
            size = shape.element_bytes
            for _, owner, start, stop in sorted(self._cuts(bucket, shape)):
                low, high = start * size, stop * size
                yield Block(bucket, place, start, stop, low, high, owner, shared=bucket not in self.direct)
                place += 1

    def _cuts(self, bucket: int, shape: Shape) -> Iterator[tuple[int, int, int, int]]:
        """The blocks of a bucket: each one's number among those of its owner, the owner, and its limits in elements."""
        length = self.block_bytes // shape.element_bytes
        for owner in self.ranks:
            if bucket in self.direct:
                yield 0, owner, 0, shape.num_elements
                continue
            first, last = self._segment(shape.num_elements, owner)
            for number, start in enumerate(range(first, last, length)):
                yield number, owner, start, min(start + length, last)

    def _segment(self, num_elements: int, owner: int) -> tuple[int, int]:
        """The elements that ``owner`` folds of a bucket."""
        owners = self.sharing.owners or tuple(self.ranks)
        if owner not in owners:
            return 0, 0
        number = owners.index(owner)
        return _cut_at(num_elements, number, len(owners)), _cut_at(num_elements, number + 1, len(owners))


def _flat_edges(rank: int, owner: int, ranks: Sequence[int]) -> Iterator[Edge]:
    """The edges of ``rank`` for a block whose pieces every rank sends directly to the owner."""
    for child in ranks if rank == owner else (rank,):
        if child != owner:
            yield Edge(child, owner, (child,))


def _add(block: Block, num_pieces: int, pieces: list[Transfer], sums: list[Transfer]) -> None:
    """Add the frames of a block from one rank to another: its pieces, and the sum that comes back."""
    sum_index = len(sums) if block.shared else -1
    content = block.content(Kind.PIECES, num_pieces=num_pieces)
    pieces.append(Transfer(block, content, num_pieces * block.num_bytes, sum_index))
    if block.shared:
        sums.append(Transfer(block, block.content(Kind.SUM), block.num_bytes))


def _scratch_of(routes: Sequence[Route]) -> tuple[dict[tuple[int, int], int], int]:
    """Where the pieces of each block and sender are received, and how much memory that takes.

    For each rank, there are pieces of at most ``WINDOW`` blocks at a time whose sum has not been sent back to it.
    """
    received: dict[tuple[int, int], int] = {}
    end = 0
    for rank, route in enumerate(routes):
        frames = [(frame.item.place, frame) for frame in route.pieces_in if isinstance(frame.item, Block)]
        size = padded(max((frame.num_bytes for _, frame in frames if frame.sum_index >= 0), default=0))
        first, end = end, end + WINDOW * size
        for place, frame in frames:
            if frame.sum_index >= 0:
                received[place, rank] = first + frame.sum_index % WINDOW * size
            else:
                received[place, rank] = end
                end += padded(frame.num_bytes)
    return received, end


def _direct_buckets(shapes: Sequence[Shape], num_pieces: int) -> frozenset[int]:
    """The buckets that every rank folds for itself, as far as a bounded scratch memory allows."""
    chosen: set[int] = set()
    room = MAX_DIRECT_BYTES
    for bucket, shape in enumerate(shapes):
        size = shape.num_bytes
        if 0 < size <= min(DIRECT_BYTES, room) and size * num_pieces <= ROUND_PAYLOAD_BYTES:
            chosen.add(bucket)
            room -= padded(size)
    return frozenset(chosen)


def _cut_at(num_elements: int, number: int, num_owners: int) -> int:
    """The first element of the segment of owner ``number`` of ``num_owners``."""
    units = -(-num_elements // CUT_ELEMENTS)
    return min(num_elements, units * number // num_owners * CUT_ELEMENTS)


def padded(size: int) -> int:
    """Round ``size`` in bytes up to a multiple of 64, at which every piece of memory begins."""
    return -(-size // 64) * 64
