"""How buckets are cut over the members of a round: which rank folds which elements, in blocks of which size.

A bucket is cut into one segment for each rank, its owner, and a segment into blocks. Every member sends its pieces of a
block to the owner, which folds them and sends the sum to everyone (reduce-scatter and all-gather). Ranks behind a slow
link own nothing. A bucket so small that only the number of hops counts is one block that every rank folds for itself.

Ranks that share memory are a group. They fold a large bucket by group: inside a group one rank, the local owner of a
block, folds the pieces of all, and only the subtrees that remain go to the block's owner, which sends the sum back to
the local owner alone. The owner is the local owner of its own group. A rank that shares memory with nobody is a group
too. Blocks, their owners and the tree are the same, whatever carries the pieces and whoever adds them.

Inside a group blocks are exchanged in stages. In a stage a member copies its pieces of several blocks into a slot of
its own segment, the local owners fold straight from the others' segments, and leave the sums in their own, where the
others read them.
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
    NO_ROUTE,
    NOT_SHARED,
    NUM_SLOTS,
    WINDOW,
    Block,
    Part,
    Route,
    Shape,
    Sharing,
    Stage,
    Transfer,
)
from .folding import Folding, folding
from .frames import ROUND_PAYLOAD_BYTES, Kind
from .tree import Interval


@dataclass(frozen=True)
class Layout:
    """The cut of all buckets of a round as one rank sees it."""

    num_slots: int
    """Pieces held by all ranks."""
    flat: Folding
    """Of an own block to which every rank sends its pieces."""
    own: Folding
    """Of an own block of a bucket that is folded by group."""
    inner: Folding
    """Of another's block of such a bucket, as its local owner."""
    direct: frozenset[int]
    """Buckets that every rank folds for itself."""
    grouped: frozenset[int]
    """Buckets that are folded by group."""
    blocks: tuple[Block, ...]
    """Those that this rank owns, by bucket and number."""
    part_of: tuple[Part | None, ...]
    """For each of these blocks the part that it belongs to, if it is shared with partners."""
    num_senders: tuple[int, ...]
    """For each of these blocks the frames with pieces that come."""
    stages: tuple[Stage, ...]
    num_folders: tuple[int, ...]
    """For each stage how many partners are local owners of a part."""
    num_inside: tuple[int, ...]
    """For each stage the blocks of which this rank is the local owner."""
    partners: frozenset[int]
    """The other ranks of the group."""
    local_owners: tuple[int, ...]
    """For the blocks of each rank the local owner in the own group."""
    receivers: frozenset[int]
    """The ranks of other groups that receive the sums of own blocks that are folded by group."""
    routes: tuple[Route, ...]
    """What is exchanged with each rank."""
    slot_bytes: int
    """Scratch memory for the blocks of one slot of the fold."""
    block_bytes: int
    """Of a block, at most."""


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
        self.groups = tuple(map(sharing.group_of, self.ranks))
        self.inner = {group: self._inside(group) for group in set(self.groups)}
        """For each group how the pieces of its members are added up."""
        counts = [*map(len, pieces), *(len(inner.results) for inner in self.inner.values())]
        self.block_bytes = max(64, ROUND_PAYLOAD_BYTES // max(1, *counts) // 64 * 64)
        self.direct = _direct_buckets(shapes, counts) if len(pieces) > 1 else frozenset()
        self.grouped = frozenset(
            bucket
            for bucket, shape in enumerate(shapes)
            if bucket not in self.direct and sharing.groups and shape.num_bytes >= max(1, sharing.min_bytes)
        )
        self.blocks = [self._blocks(owner, shapes) if any(pieces) else [] for owner in self.ranks]
        self.stages = tuple(self._stages())

    def seen_by(self, rank: int) -> Layout:
        own = self.blocks[rank]
        group = self.groups[rank]
        stages = self.stages if len(group) > 1 else ()
        part_of = {(part.owner, block.place): part for stage in stages for part in stage.parts for block in part.blocks}
        routes = tuple(
            Route(
                pieces_out=tuple(self._pieces(rank, other, part_of)),
                pieces_in=tuple(self._pieces(other, rank, {})),
                sums_in=tuple(self._sums(other, rank, part_of)),
                folded_in=tuple(self._folded(other, stages)) if other in group else (),
            )
            if other != rank
            else NO_ROUTE
            for other in self.ranks
        )
        senders = Counter(transfer.item for route in routes for transfer in route.pieces_in)
        folders = [[self._local_owner(rank, part.owner) for part in stage.parts] for stage in stages]
        return Layout(
            num_slots=sum(map(len, self.pieces)),
            flat=folding(self.num_leaves, self.pieces),
            own=folding(self.num_leaves, tuple(self._sent(sender, rank) for sender in self.ranks)),
            inner=self.inner[group],
            direct=self.direct,
            grouped=self.grouped,
            blocks=tuple(own),
            part_of=tuple(part_of.get((rank, block.place)) for block in own),
            num_senders=tuple(senders[block] for block in own),
            stages=stages,
            num_folders=tuple(len({*inside} - {rank}) for inside in folders),
            num_inside=tuple(
                sum(len(part.blocks) for part, folder in zip(stage.parts, inside, strict=True) if folder == rank)
                for stage, inside in zip(stages, folders, strict=True)
            ),
            partners=frozenset(group) - {rank},
            local_owners=tuple(self._local_owner(rank, owner) for owner in self.ranks),
            receivers=frozenset(self._local_owner(other, rank) for other in self.ranks if other not in group),
            routes=routes,
            slot_bytes=max((_scratch_end(block) for blocks in self.blocks for block in blocks), default=0),
            block_bytes=self.block_bytes,
        )

    def _local_owner(self, rank: int, owner: int) -> int:
        """In the group of ``rank``."""
        return self.sharing.local_owner(self.groups[rank], owner)

    def _inside(self, group: tuple[int, ...]) -> Folding:
        return folding(self.num_leaves, tuple(held if rank in group else () for rank, held in enumerate(self.pieces)))

    def _sent(self, sender: int, owner: int) -> tuple[Interval, ...]:
        """The subtrees that ``owner`` has from ``sender`` of a block that is folded by group."""
        if self.groups[sender] == self.groups[owner]:
            return self.pieces[sender]
        return self.inner[self.groups[sender]].results if self._local_owner(sender, owner) == sender else ()

    def _pieces(self, sender: int, owner: int, part_of: Mapping[tuple[int, int], Part]) -> Iterator[Transfer]:
        """The frames with pieces. Of a bucket that is folded by group every group sends some, even if it has none.

        So an owner has to wait for them, and no sum comes to a group before its members have announced the stage.
        """
        count = len(self.pieces[sender])
        num_results = len(self.inner[self.groups[sender]].results)
        for item in self._items(owner, of_group=self.groups[sender] == self.groups[owner]):
            if isinstance(item, Stage):
                yield Transfer(item, item.content(Kind.STAGED))
            elif item.bucket not in self.grouped:
                if count:
                    yield Transfer(item, item.content(Kind.PIECES, num_pieces=count))
            elif self._local_owner(sender, owner) == sender:
                content = item.content(Kind.PIECES, num_pieces=num_results)
                yield Transfer(item, content, part_of.get((owner, item.place)))

    def _sums(self, owner: int, receiver: int, part_of: Mapping[tuple[int, int], Part]) -> Iterator[Transfer]:
        """The frames with sums."""
        is_of_group = self.groups[owner] == self.groups[receiver]
        is_local_owner = not is_of_group and self._local_owner(receiver, owner) == receiver
        for block in self.blocks[owner]:
            if block.shared and (block.bucket not in self.grouped or is_local_owner):
                yield Transfer(block, block.content(Kind.SUM), part_of.get((owner, block.place)))

    def _folded(self, rank: int, stages: Sequence[Stage]) -> Iterator[Transfer]:
        """The frames that say that sums lie in the segment of ``rank``."""
        for stage in stages:
            if any(self._local_owner(rank, part.owner) == rank for part in stage.parts):
                yield Transfer(stage, stage.content(Kind.FOLDED))

    def _items(self, owner: int, *, of_group: bool) -> list[Block | Stage]:
        """The blocks of ``owner``; inside its group stages in the place of those that are folded by group."""
        if not of_group:
            return list(self.blocks[owner])
        items: list[Block | Stage] = [block for block in self.blocks[owner] if block.bucket not in self.grouped]
        items += self.stages
        return sorted(items, key=lambda item: (item.bucket, item.number))

    def _stages(self) -> Iterator[Stage]:
        """The buckets that are folded by group, in stages of evenly many blocks, which all ranks fold side by side."""
        most = self.sharing.stage_blocks
        number = 0
        for bucket in sorted(self.grouped):
            blocks = [block for own in self.blocks for block in own if block.bucket == bucket]
            blocks.sort(key=lambda block: (block.number, block.owner))
            num_stages = -(-len(blocks) // most)
            for turn in range(num_stages):
                first, last = (len(blocks) * edge // num_stages for edge in (turn, turn + 1))
                yield Stage(bucket, number, tuple(self._parts(blocks[first:last], number)))
                number += 1

    def _parts(self, blocks: Sequence[Block], stage: int) -> Iterator[Part]:
        """The blocks of a stage by owner."""
        offset = stage % NUM_SLOTS * self.sharing.stage_blocks * ROUND_PAYLOAD_BYTES
        for _, own in groupby(sorted(blocks, key=lambda block: (block.owner, block.number)), lambda block: block.owner):
            part = Part(stage, offset, offset + self.sharing.results_offset, tuple(own))
            offset += len(part.blocks) * ROUND_PAYLOAD_BYTES
            yield part

    def _blocks(self, owner: int, shapes: Sequence[Shape]) -> list[Block]:
        blocks: list[Block] = []
        turn = 0
        kept = WINDOW * self.block_bytes
        for bucket, shape in enumerate(shapes):
            size = shape.element_bytes
            if bucket in self.direct:
                high = shape.num_bytes
                blocks.append(Block(bucket, 0, 0, shape.num_elements, 0, high, kept, -1, len(blocks), owner))
                kept += padded(high)
                continue
            first, last = self._segment(shape.num_elements, owner)
            length = self.block_bytes // size
            for number, start in enumerate(range(first, last, length)):
                stop = min(start + length, last)
                scratch = turn % WINDOW * self.block_bytes
                low, high = start * size, stop * size
                blocks.append(Block(bucket, number, start, stop, low, high, scratch, turn, len(blocks), owner))
                turn += 1
        return blocks

    def _segment(self, num_elements: int, owner: int) -> tuple[int, int]:
        """The elements that ``owner`` folds of a bucket."""
        owners = self.sharing.owners or tuple(self.ranks)
        if owner not in owners:
            return 0, 0
        number = owners.index(owner)
        return _edge(num_elements, number, len(owners)), _edge(num_elements, number + 1, len(owners))


def _direct_buckets(shapes: Sequence[Shape], counts: Sequence[int]) -> frozenset[int]:
    """The buckets that every rank folds for itself, as far as a bounded scratch memory allows."""
    chosen: set[int] = set()
    room = MAX_DIRECT_BYTES
    for bucket, shape in enumerate(shapes):
        size = shape.num_bytes
        if 0 < size <= min(DIRECT_BYTES, room) and size * max(counts) <= ROUND_PAYLOAD_BYTES:
            chosen.add(bucket)
            room -= padded(size)
    return frozenset(chosen)


def _scratch_end(block: Block) -> int:
    return block.scratch + padded(block.high - block.low)


def _edge(num_elements: int, number: int, num_owners: int) -> int:
    """Where the segment of an owner begins, by how many own segments before it."""
    units = -(-num_elements // CUT_ELEMENTS)
    return min(num_elements, units * number // num_owners * CUT_ELEMENTS)


def padded(size: int) -> int:
    """``size`` in bytes, up to the next multiple of 64, which every piece of memory begins at."""
    return -(-size // 64) * 64
