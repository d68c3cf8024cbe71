"""One exchange under way: pieces out to the ranks that fold them, sums back from them, all by the calling thread.

It cannot lock up, because of three rules. A member sends the pieces of a block only when the sum of the block
``WINDOW`` before it has come back, so in ``finish``, when all buckets are pushed, there is a place for every frame of
this round that can arrive: no member stops reading its links, and an ABORT is always heard. Pieces depend on nothing
but the sender's own compute, and a sum on pieces alone, so the oldest block that is not folded can always be completed.
And what a member cannot place yet (a bucket it has not pushed, a later round) waits for its own compute, never for
another member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .exchange import Abandoned, RoundSpec
from .frames import MAX_HEADER_BYTES, Frame, Kind, Malformed, decode_abort, encode, encode_abort
from .layout import WINDOW, Block, Shape, layout
from .link import BrokenLink, Link, Verdict
from .memory import Array, adder, array_of, bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .switchboard import Switchboard


PARTING_MS = 500


class Scratch:
    """Memory in which the pieces of others wait to be folded; kept from round to round."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._bytes = bytes_of(self._tensor)
        self._arrays: dict[torch.dtype, Array] = {}

    @property
    def num_bytes(self) -> int:
        """The most that has been needed."""
        return len(self._bytes)

    def reserve(self, num_bytes: int) -> None:
        """Have at least this much."""
        if num_bytes > self.num_bytes:
            self._tensor = torch.empty(num_bytes, dtype=torch.uint8)
            self._bytes = bytes_of(self._tensor)
            self._arrays.clear()

    def bytes_at(self, offset: int, num_bytes: int) -> memoryview:
        """Some of it, to be received into."""
        return self._bytes[offset : offset + num_bytes]

    def array_at(self, offset: int, num_elements: int, dtype: torch.dtype) -> Array:
        """Some of it, to be added."""
        array = self._arrays.get(dtype)
        if array is None:
            whole = self._tensor[: len(self._bytes) // dtype.itemsize * dtype.itemsize]
            array = self._arrays[dtype] = array_of(whole.view(dtype))
        first = offset // dtype.itemsize
        return array[first : first + num_elements]


class Bucket:
    """The memory of one bucket as bytes to move and as arrays to add."""

    def __init__(self, partials: Sequence[Tensor], sums: Tensor, *, direct: bool) -> None:
        self.dtype = sums.dtype
        self.add: Callable[..., object] = adder(sums.dtype)
        self.sums = array_of(sums)
        self.sums_bytes = bytes_of(sums)
        self.partials = [array_of(partial) for partial in partials]
        self.partials_bytes = [bytes_of(partial) for partial in partials]
        self.own_pieces = b"".join(self.partials_bytes) if direct else b""
        """Of a bucket that everyone folds for itself, a copy: our own fold may come before everyone has been sent them."""
        self.in_place = bool(partials) and partials[0].data_ptr() == sums.data_ptr()


class OpenMeshRound:
    """An open round of the mesh; see ``OpenRound``."""

    def __init__(self, switchboard: Switchboard, scratch: Scratch, spec: RoundSpec, worker: int) -> None:
        shapes = tuple(Shape(sums.numel(), sums.element_size()) for sums in spec.sums)
        self.spec = spec
        self.rank = spec.members.index(worker)
        self.layout = layout(spec.pieces, spec.num_leaves, shapes)
        self.scratch = scratch
        self.buckets: list[Bucket] = []
        self.peers: list[Peer] = []
        self.failure: Abandoned | None = None
        self.closed = False
        self._switchboard = switchboard
        self._blocks = self.layout.blocks[self.rank]
        self._shared = 0
        self._awaited = [0] * len(self._blocks)
        scratch.reserve(self.layout.slot_bytes * sum(self.layout.counts))
        self._connect()

    def push(self, bucket: int) -> None:
        """See ``OpenRound.push``. A lost member is reported by ``finish``."""
        if bucket != len(self.buckets):
            raise ValueError(f"bucket {bucket} pushed when {len(self.buckets)} is next")
        direct = bucket in self.layout.direct
        self.buckets.append(Bucket(self.spec.partials[bucket], self.spec.sums[bucket], direct=direct))
        self._heed()
        if self.failure is not None:
            return
        self._fold_own(bucket)
        for peer in self.peers:
            peer.link.unpark()
            peer.send_pieces()
        if not direct:  # a small one leaves together with what follows it
            self._move()

    def finish(self, header: bytes) -> tuple[bytes, ...]:
        """See ``OpenRound.finish``."""
        if len(self.buckets) != len(self.spec.sums):
            raise ValueError(f"finished with {len(self.buckets)} of {len(self.spec.sums)} buckets pushed")
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed")
        frame = encode(Kind.HEADER, self.spec.tag, length=len(header)) + header
        try:
            for peer in self.peers:
                peer.link.send(frame)
            self._run()
        finally:
            self.close()
        headers = {peer.rank: bytes(peer.header or b"") for peer in self.peers}
        return tuple(headers.get(rank, header) for rank in range(len(self.spec.members)))

    def close(self) -> None:
        """Let go of all memory of the round; links stay usable."""
        if not self.closed:
            self.closed = True
            for peer in self.peers:
                peer.link.cut_short()

    def fail(self, suspect: int, reason: str, *, told_by: Link | None = None) -> None:
        """End the round without a result and tell the other members."""
        if self.failure is not None:
            return
        self.failure = Abandoned(suspect, reason)
        frame = encode_abort(self.spec.tag, suspect=suspect, reason=reason)
        self.close()
        for link in [peer.link for peer in self.peers]:
            if link is not told_by and self._switchboard.links.get(link.peer) is link:
                link.notify(frame)
                try:
                    link.flush()
                except BrokenLink:
                    self._switchboard.drop(link)

    def _part(self) -> None:
        """Wait until the others have taken the rest of what was being sent to them and the ABORT behind it.

        One that takes nothing for a while is not in ``finish``; it gets the rest during this worker's next call.
        """
        board = self._switchboard
        board.listen(())
        while any(peer.link.pending and not peer.link.closed for peer in self.peers):
            if not board.wait(patience_ms=PARTING_MS):
                return

    def arrived(self, block: Block, number: int) -> None:
        """A peer's pieces of own block ``number`` are in the scratch memory."""
        self._awaited[number] -= 1
        if not self._awaited[number]:
            self._complete(block)

    def has_room(self, block: Block) -> bool:
        """Whether others may already send their pieces of an own block."""
        return block.turn < self._shared + WINDOW

    def _connect(self) -> None:
        members, links = self.spec.members, self._switchboard.links
        num_senders = sum(1 for rank, count in enumerate(self.layout.counts) if count and rank != self.rank)
        self._awaited = [num_senders] * len(self._blocks)
        # Each rank starts with its right neighbour, so that not everyone sends to the same member first.
        ranks = [*range(self.rank + 1, len(members)), *range(self.rank)]
        missing = [members[rank] for rank in ranks if members[rank] not in links]
        self.peers = [Peer(self, links[members[rank]], rank) for rank in ranks if members[rank] in links]
        self._switchboard.listen(())
        self._switchboard.listen([peer.link for peer in self.peers])
        if missing:
            self.fail(missing[0], "there is no link to it")
        self._heed()

    def _run(self) -> None:
        while True:
            if self._switchboard.attend():
                self._heed()
            self._move()
            if self.failure is not None:
                self._part()
                raise self.failure
            if all(not peer.owed and not peer.link.pending for peer in self.peers):
                return
            self._switchboard.wait()

    def _heed(self) -> None:
        """Act on what other threads have said."""
        suspicion = self._switchboard.take_suspicion()
        if suspicion is not None:
            self.fail(suspicion.suspect, suspicion.reason)
        for peer in self.peers:
            if peer.link.retired:
                self.fail(peer.link.peer, "its link was removed")

    def _move(self) -> None:
        """Move what can move without waiting."""
        moving = self.failure is None
        while moving:
            moving = False
            for peer in self.peers:
                link = peer.link
                if link.readable and link.listening and not link.parked:
                    moving = True
                    self._receive(peer)
                if link.writable and link.pending:
                    moving = True
                    self._flush(peer)
                if self.failure is not None:
                    return

    def _receive(self, peer: Peer) -> None:
        try:
            peer.link.receive(peer)
        except BrokenLink as broken:
            self._lose(peer, broken)

    def _flush(self, peer: Peer) -> None:
        try:
            peer.link.flush()
        except BrokenLink as broken:
            self._lose(peer, broken)

    def _lose(self, peer: Peer, broken: BrokenLink) -> None:
        if peer.owed or peer.link.pending:
            self._switchboard.drop(peer.link)
            self.fail(broken.peer, broken.reason)
        else:
            # It has given and taken all there is in this round; the next one will find it gone.
            peer.link.listening = False

    def _fold_own(self, bucket: int) -> None:
        """Fold the blocks to which nobody else contributes."""
        for number, block in enumerate(self._blocks):
            if block.bucket == bucket and not self._awaited[number]:
                self._complete(block)

    def _complete(self, block: Block) -> None:
        self._fold(block)
        if block.shared:
            self._shared += 1
            self._share(block)

    def _fold(self, block: Block) -> None:
        """Add up all pieces of a block in tree order, and leave the sum in its place."""
        bucket = self.buckets[block.bucket]
        length = block.stop - block.start
        values: list[Array] = []
        for rank, count in enumerate(self.layout.counts):
            if rank == self.rank:
                values.extend(partial[block.start : block.stop] for partial in bucket.partials)
            elif count:
                pieces = self.scratch.array_at(self._scratch_offset(block, rank), length * count, bucket.dtype)
                values.extend(pieces[at : at + length] for at in range(0, length * count, length))
        total = bucket.sums[block.start : block.stop]
        folds = self.layout.folds
        if not folds:
            if not bucket.in_place:
                total[:] = values[0]
            return
        with np.errstate(all="ignore"):  # an overflow is for the training loop to find
            for left, right in folds[:-1]:
                bucket.add(values[left], values[right], out=values[left])
            left, right = folds[-1]
            bucket.add(values[left], values[right], out=total)

    def _share(self, block: Block) -> None:
        if not self.peers:
            return
        header = encode(Kind.SUM, self.spec.tag, bucket=block.bucket, block=block.index, length=block.high - block.low)
        payload = self.buckets[block.bucket].sums_bytes[block.low : block.high]
        for peer in self.peers:
            peer.link.send(header, payload)
            self._flush(peer)

    def place_pieces(self, block: Block, rank: int) -> memoryview:
        """Where the pieces that ``rank`` holds of an own block are received."""
        return self.scratch.bytes_at(
            self._scratch_offset(block, rank), (block.high - block.low) * self.layout.counts[rank]
        )

    def _scratch_offset(self, block: Block, rank: int) -> int:
        return self.layout.first_slot[rank] * self.layout.slot_bytes + self.layout.counts[rank] * block.scratch


class Peer:
    """Another member of a round: what it owes us, what we owe it, and where its frames go."""

    def __init__(self, round_: OpenMeshRound, link: Link, rank: int) -> None:
        self.link = link
        self.rank = rank
        self.header: bytearray | None = None
        plan = round_.layout
        self._round = round_
        self._tag = round_.spec.tag
        self._our_blocks = plan.blocks[round_.rank] if plan.counts[rank] else ()
        self._its_blocks = plan.blocks[rank] if plan.counts[round_.rank] else ()
        self._its_sums = plan.sums[rank]
        self._pieces_sent = 0
        self._pieces_received = 0
        self._sums_received = 0
        self._abort = bytearray()
        self.owed = len(self._our_blocks) + len(self._its_sums) + 1
        """Frames of this round still to come from it."""

    def send_pieces(self) -> None:
        """Queue our pieces of its next blocks, as far as buckets are pushed and it has room."""
        pushed = len(self._round.buckets)
        blocks = self._its_blocks
        while self._pieces_sent < len(blocks):
            block = blocks[self._pieces_sent]
            if block.bucket >= pushed or block.turn >= self._sums_received + WINDOW:
                return
            self._pieces_sent += 1
            self.link.send(*self._pieces_frame(block))

    def _pieces_frame(self, block: Block) -> Sequence[bytes | memoryview]:
        bucket = self._round.buckets[block.bucket]
        length = (block.high - block.low) * len(bucket.partials)
        header = encode(Kind.PIECES, self._tag, bucket=block.bucket, block=block.index, length=length)
        if block.shared:
            return header, *(partial[block.low : block.high] for partial in bucket.partials_bytes)
        return header, bucket.own_pieces

    def place(self, frame: Frame) -> list[memoryview] | Verdict:
        """See ``Sink``."""
        if self._round.closed:
            return Verdict.PARK
        if frame.tag != self._tag:
            return self._place_other(frame)
        if frame.kind is Kind.SUM:
            block = _expected(frame, self._its_sums, self._sums_received, num_pieces=1)
            if block.bucket >= len(self._round.buckets):
                return Verdict.PARK
            return [self._round.buckets[block.bucket].sums_bytes[block.low : block.high]]
        if frame.kind is Kind.PIECES:
            count = self._round.layout.counts[self.rank]
            block = _expected(frame, self._our_blocks, self._pieces_received, num_pieces=count)
            if block.bucket >= len(self._round.buckets):
                return Verdict.PARK
            if not self._round.has_room(block):
                raise Malformed(f"pieces of bucket {frame.bucket}, block {frame.block}, before there is room for them")
            return [self._round.place_pieces(block, self.rank)]
        if frame.kind is Kind.HEADER and self.header is None:
            self.header = bytearray(frame.length)
            return [memoryview(self.header)]
        if frame.kind is Kind.ABORT:
            self._abort = bytearray(frame.length)
            return [memoryview(self._abort)]
        if frame.kind in (Kind.SKELETON, Kind.STATE):
            return self._place_other(frame)
        raise Malformed(f"a second {frame.kind.name} frame in one round")

    def _place_other(self, frame: Frame) -> Verdict:
        """What belongs to this round's past, such as the rest of a hand-over that was given up, is not wanted any more."""
        if frame.kind in (Kind.SKELETON, Kind.STATE):
            stale = frame.tag.generation <= self._tag.generation
        else:
            stale = frame.tag < self._tag
        return Verdict.DISCARD if stale else Verdict.PARK

    def arrived(self, frame: Frame) -> None:
        """See ``Sink``."""
        if frame.kind is Kind.ABORT:
            suspect, reason = decode_abort(self._abort)
            self._round.fail(suspect, reason, told_by=self.link)
            return
        self.owed -= 1
        if frame.kind is Kind.SUM:
            self._sums_received += 1
            self.send_pieces()
        elif frame.kind is Kind.PIECES:
            number = self._pieces_received
            self._pieces_received += 1
            self._round.arrived(self._our_blocks[number], number)


def _expected(frame: Frame, blocks: Sequence[Block], number: int, *, num_pieces: int) -> Block:
    """The block that must come next, if ``frame`` is it."""
    if number < len(blocks):
        block = blocks[number]
        if (frame.bucket, frame.block, frame.length) == (
            block.bucket,
            block.index,
            (block.high - block.low) * num_pieces,
        ):
            return block
    raise Malformed(f"{frame.kind.name} of bucket {frame.bucket}, block {frame.block}, is not what comes next")
