"""One exchange under way: pieces out to the ranks that fold them, sums back from them, all by the calling thread.

It cannot lock up, because of three rules. A member sends the pieces of a block only when the sum of the block
``WINDOW`` before it has come back, so in ``finish``, when all buckets are pushed, there is a place for every frame of
this round that can arrive: no member stops reading its links, and an ABORT is always heard. Pieces depend on nothing
but the sender's own compute, and a sum on pieces alone, so the oldest block that is not folded can always be completed.
And what a member cannot place yet (a bucket it has not pushed, a later round) waits for its own compute, never for
another member.
"""

import time

import numpy as np

from .exchange import Abandoned, RoundSpec
from .frames import MAX_HEADER_BYTES, Kind, encode, encode_abort, encode_tag
from .layout import WINDOW, Block, Shape, Transfer, layout
from .link import BrokenLink, Link, Remains
from .memory import Array, Bucket, Scratch
from .peer import Peer
from .switchboard import Switchboard

PARTING_MS = 500


class OpenMeshRound:
    """An open round of the mesh; see ``OpenRound``."""

    def __init__(self, switchboard: Switchboard, scratch: Scratch, spec: RoundSpec, worker: int) -> None:
        shapes = tuple(Shape(sums.numel(), sums.element_size()) for sums in spec.sums)
        self.rank = spec.members.index(worker)
        self.layout = layout(spec.pieces, spec.num_leaves, shapes, self.rank)
        self.closed = False
        self.buckets: list[Bucket] = []
        """Those that are pushed."""
        self.last = (self.rank, 0.0)
        self.num_buckets = len(spec.sums)
        self._spec = spec
        self._tag = encode_tag(spec.tag)
        self._switchboard = switchboard
        self._scratch = scratch
        self._failure: Abandoned | None = None
        self._peers: list[Peer] = []
        num_senders = sum(1 for rank, count in enumerate(self.layout.counts) if count and rank != self.rank)
        self._awaited = [num_senders] * len(self.layout.blocks)
        self._shared = 0
        scratch.reserve(self.layout.slot_bytes * sum(self.layout.counts))
        self._connect()

    def push(self, bucket: int) -> None:
        """See ``OpenRound.push``. A lost member is reported by ``finish``."""
        if bucket != len(self.buckets):
            raise ValueError(f"bucket {bucket} pushed when {len(self.buckets)} is next")
        direct = bucket in self.layout.direct
        self.buckets.append(Bucket(self._spec.partials[bucket], self._spec.sums[bucket], direct=direct))
        self._heed()
        if self._failure is not None:
            return
        self._fold_own(bucket)
        for peer in self._peers:
            peer.link.unpark()
            peer.send_pieces()
        if not direct:  # a small one leaves together with what follows it
            self._move()

    def finish(self, header: bytes) -> tuple[bytes, ...]:
        """See ``OpenRound.finish``."""
        if len(self.buckets) != len(self._spec.sums):
            raise ValueError(f"finished with {len(self.buckets)} of {len(self._spec.sums)} buckets pushed")
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed")
        begun = time.monotonic()
        frame = encode(Kind.HEADER, self._spec.tag, length=len(header)) + header
        try:
            for peer in self._peers:
                peer.link.send(frame)
            self._run()
            self.last = self._last_header(begun)
            headers = {peer.rank: bytes(peer.header or b"") for peer in self._peers}
        except BaseException as error:
            self.fail(self._spec.members[self.rank], f"it left the round: {error!r}")
            self._part()
            raise
        finally:
            self.close()
            self._peers = []  # they refer back to this round, which holds the tensors
        return tuple(headers.get(rank, header) for rank in range(len(self._spec.members)))

    def _last_header(self, begun: float) -> tuple[int, float]:
        """Tell whose header came last, and how long after all others and the beginning of the wait."""
        if not self._peers:
            return self.rank, 0.0
        last = max(self._peers, key=lambda peer: peer.header_time)
        before = max((peer.header_time for peer in self._peers if peer is not last), default=begun)
        return last.rank, max(0.0, last.header_time - max(before, begun))

    def close(self) -> None:
        """Let go of all memory of the round; links stay usable."""
        if not self.closed:
            self.closed = True
            for peer in self._peers:
                peer.link.cut_short()

    def fail(self, suspect: int, reason: str, *, told_by: Link | None = None, is_hearsay: bool = False) -> None:
        """End the round without a result and tell the other members."""
        if self.closed:
            return
        self.close()
        self._failure = Abandoned(suspect, reason, is_hearsay=is_hearsay or told_by is not None)
        frame = encode_abort(self._spec.tag, suspect=suspect, reason=reason)
        for link in [peer.link for peer in self._peers]:
            if link is not told_by and not link.retired and not link.closed:
                link.notify(frame)
                self._switchboard.flush(link)

    def has_room(self, block: Block) -> bool:
        """Whether others may already send their pieces of an own block."""
        return block.turn < self._shared + WINDOW

    def place_pieces(self, block: Block, rank: int) -> memoryview:
        """Where the pieces that ``rank`` holds of an own block are received."""
        num_bytes = (block.high - block.low) * self.layout.counts[rank]
        return self._scratch.bytes_at(self._scratch_offset(block, rank), num_bytes)

    def pieces_arrived(self, number: int) -> None:
        """Another rank's pieces of own block ``number`` are in their place."""
        self._awaited[number] -= 1
        if not self._awaited[number]:
            self._complete(self.layout.blocks[number])

    def _connect(self) -> None:
        members, links = self._spec.members, self._switchboard.links
        # Each rank starts with its right neighbour, so that not everyone sends to the same member first.
        ranks = [*range(self.rank + 1, len(members)), *range(self.rank)]
        missing = [members[rank] for rank in ranks if members[rank] not in links]
        self._peers = [
            Peer(self, links[members[rank]], rank, self._spec.tag) for rank in ranks if members[rank] in links
        ]
        self._switchboard.listen(())
        self._switchboard.listen([peer.link for peer in self._peers])
        if missing:
            self.fail(missing[0], "there is no link to it")
        self._heed()

    def _run(self) -> None:
        while True:
            if self._switchboard.attend():
                self._heed()
            self._move()
            if self._failure is not None:
                raise self._failure
            if all(not peer.owed and not peer.link.pending for peer in self._peers):
                return
            self._switchboard.wait()

    def _heed(self) -> None:
        """Act on what other threads have said."""
        suspicion = self._switchboard.take_suspicion()
        if suspicion is not None and suspicion.generation in (None, self._spec.tag.generation):
            self.fail(suspicion.suspect, suspicion.reason, is_hearsay=True)
        for peer in self._peers:
            if peer.link.retired:
                self.fail(peer.link.peer, "its link was removed")

    def _move(self) -> None:
        """Move what can move without waiting."""
        with np.errstate(all="ignore"):  # an overflow is for the training loop to find
            while self._failure is None and any([self._move_with(peer) for peer in self._peers]):  # noqa: C419 - all, not the first
                pass

    def _move_with(self, peer: Peer) -> bool:
        """Receive and send once; say whether it was worth a try."""
        link = peer.link
        heard = link.readable and link.listening and not link.parked and self._failure is None
        if heard:
            self._receive(peer)
        said = link.writable and link.pending and self._failure is None
        if said:
            self._flush(peer)
        return heard or said

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

    def _part(self) -> None:
        """Wait until the others have taken the rest of what was being sent to them and the ABORT behind it.

        What they still send of this round is thrown away, since they may wait for the same. One that takes nothing for
        a while has stopped; it gets the rest during this worker's next call.
        """
        board, remains = self._switchboard, Remains(lambda tag: tag <= self._spec.tag)
        links = [peer.link for peer in self._peers]
        board.listen(())
        board.listen(links)
        while True:
            for link in links:
                board.move(link, remains)
            if not any(link.pending and not link.retired for link in links):
                return
            if not board.wait(patience_ms=PARTING_MS):
                return

    def _fold_own(self, bucket: int) -> None:
        """Complete the blocks to which nobody else contributes."""
        if not any(count for rank, count in enumerate(self.layout.counts) if rank != self.rank):
            with np.errstate(all="ignore"):
                for transfer in self.layout.blocks:
                    if transfer.block.bucket == bucket:
                        self._complete(transfer)

    def _complete(self, transfer: Transfer) -> None:
        """Fold a block of which all pieces are there, and send the sum to everyone."""
        block = transfer.block
        self._fold(block)
        if block.shared:
            self._shared += 1
            header = self._tag + transfer.content
            payload = self.buckets[block.bucket].sums_bytes[block.low : block.high]
            for peer in self._peers:
                peer.link.send(header, payload)
                self._flush(peer)

    def _fold(self, block: Block) -> None:
        """Add up all pieces of a block in tree order."""
        bucket, folds = self.buckets[block.bucket], self.layout.folds
        values = self._values(block, bucket)
        total = bucket.sums[block.start : block.stop]
        if not folds:
            if not bucket.in_place:
                total[:] = values[0]
            return
        for left, right in folds[:-1]:
            bucket.add(values[left], values[right], out=values[left])
        left, right = folds[-1]
        bucket.add(values[left], values[right], out=total)

    def _values(self, block: Block, bucket: Bucket) -> list[Array]:
        """The pieces of a block in the order of the leaves: our own partials and the others' in the scratch memory."""
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
