"""Another member of an open round: which frames are still to come from it, which are due to it, and where they go."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from .blocks import WINDOW, Block, Stage, Transfer
from .frames import MAX_HEADER_BYTES, MAX_HEADER_FRAME_BYTES, Frame, Kind, Malformed, decode_abort, encode_tag
from .link import Destination, Link, Refusal, Sink
from .reduction import Reduction
from .spec import OtherRound, Tag

_NO_MEMORY = memoryview(bytearray())


class _Incoming:
    """The frames of one kind, in the order in which they arrive."""

    def __init__(self, encoded_tag: bytes, transfers: Sequence[Transfer]) -> None:
        self._encoded_tag = encoded_tag
        self._transfers = transfers
        self.num_taken = 0
        self.num_expected = len(transfers)
        self.header = self._next_header()
        """Header of the next frame; empty after the last one."""

    def _next_header(self) -> bytes:
        return self._encoded_tag + self.next.content if self.num_expected else b""

    @property
    def next(self) -> Transfer:
        """The next frame."""
        return self._transfers[self.num_taken]

    def take(self) -> Transfer:
        """Return the next frame, which has arrived, and advance."""
        transfer = self.next
        self.num_taken += 1
        self.num_expected -= 1
        self.header = self._next_header()
        return transfer


class RoundPeer(Sink):
    """One member as seen by the round of another.

    Calls ``on_pieces`` when pieces of an own block have arrived, ``on_group`` when others in the group or the rack can
    continue, and ``on_abort`` when the peer has aborted the round. The peer's header begins with a status of
    ``status_bytes`` for the exchange itself.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        tag: Tag,
        reduction: Reduction,
        *,
        status_bytes: int,
        on_pieces: Callable[[], None],
        on_group: Callable[[], None],
        on_abort: Callable[[Link, int, str], None],
    ) -> None:
        self.link = link
        self.rank = rank
        self.header: bytearray | None = None
        self.header_time = 0.0
        """When the peer's header had arrived, on the monotonic clock."""
        self._has_header = False
        self._num_parts = 0
        """How many frames of the header are still to come, once the first has arrived."""
        self._tag = tag
        self._encoded_tag = encode_tag(tag)
        self._reduction = reduction
        self._status_bytes = status_bytes
        self._on_pieces = on_pieces
        self._on_group = on_group
        self._on_abort = on_abort
        self._is_closed = False
        self._route = reduction.layout.routes[rank]
        self._pieces_sent = 0
        self._sums_sent = 0
        self._pieces, self._sums, self._folded = (
            _Incoming(self._encoded_tag, transfers)
            for transfers in (self._route.pieces_in, self._route.sums_in, self._route.folded_in)
        )
        self._abort = bytearray()

    @property
    def num_expected(self) -> int:
        """Number of frames of this round still to arrive from the peer."""
        return self._num_sums_expected + (not self._has_header)

    @property
    def _num_sums_expected(self) -> int:
        return self._pieces.num_expected + self._sums.num_expected + self._folded.num_expected

    @property
    def has_sums(self) -> bool:
        """Whether all pieces and sums of this round have been received from the peer, and sent to it."""
        route = self._route
        is_sent = self._pieces_sent == len(route.pieces_out) and self._sums_sent == len(route.sums_out)
        return is_sent and not self._num_sums_expected

    def close(self) -> None:
        """Release the memory of the round; frames that still arrive are deferred."""
        self._is_closed = True
        self.link.drop_buffers()

    def send_pieces(self) -> None:
        """Queue pieces of the peer's next blocks, as far as buckets are pushed and the peer has room."""
        pieces, reduction = self._route.pieces_out, self._reduction
        while self._pieces_sent < len(pieces):
            item, content, _, sum_index = pieces[self._pieces_sent]
            if item.bucket >= len(reduction.buckets):
                return
            payload: Sequence[bytes | memoryview] = ()
            if isinstance(item, Stage):
                if item.number >= reduction.num_staged:
                    return
            elif sum_index >= self._sums.num_taken + WINDOW or not reduction.is_complete(item):
                return
            else:
                payload = reduction.outgoing(item)
            self.link.send(self._encoded_tag + content, *payload)
            self._pieces_sent += 1

    def send_sums(self) -> bool:
        """Queue the next sums for the peer, as far as they are here; return whether there were any."""
        sums, before = self._route.sums_out, self._sums_sent
        while self._sums_sent < len(sums):
            block, content, _, _ = sums[self._sums_sent]
            assert isinstance(block, Block)
            if block.place not in self._reduction.summed:
                break
            self.link.send(self._encoded_tag + content, self._reduction.sum_memory(block))
            self._sums_sent += 1
        return self._sums_sent > before

    def expected(self, header: bytearray) -> Destination | None:
        """See ``Sink``."""
        for frames, on_frame in (
            (self._sums, self._on_sum),
            (self._pieces, self._on_pieces_frame),
            (self._folded, self._on_folded),
        ):
            if header == frames.header:
                if self._is_closed or frames.next.item.bucket >= len(self._reduction.buckets):
                    return None
                memory = self._memory_for(frames.next, is_sum=frames is self._sums)
                return None if memory is None else ([memory], len(memory), on_frame)
        return None

    def _memory_for(self, transfer: Transfer, *, is_sum: bool) -> memoryview | None:
        """Where the payload of a frame goes; None while there is no room for it."""
        block = transfer.item
        if isinstance(block, Stage):
            return _NO_MEMORY
        if is_sum:
            return self._reduction.sum_memory(block)
        has_room = transfer.sum_index < self._sums_sent + WINDOW
        return self._reduction.pieces_memory(block, self.rank, transfer.num_bytes) if has_room else None

    def accept(self, frame: Frame) -> Destination | Refusal:
        """See ``Sink``."""
        if self._is_closed:
            return Refusal.DEFER
        if frame.kind in (Kind.SKELETON, Kind.STATE):
            # The rest of a state transfer that was abandoned is stale.
            return Refusal.DISCARD if frame.tag.generation <= self._tag.generation else Refusal.DEFER
        if frame.tag != self._tag:
            return Refusal.DISCARD if frame.tag < self._tag else Refusal.DEFER
        if frame.kind is Kind.HEADER and not self._has_header and self._is_part_of_header(frame):
            part = bytearray(frame.length)
            return [memoryview(part)], frame.length, partial(self._on_header, part, frame.block)
        if frame.kind is Kind.ABORT:
            self._abort = bytearray(frame.length)
            return [memoryview(self._abort)], frame.length, self._on_abort_frame
        if frame.kind in (Kind.PIECES, Kind.STAGED) and not self._reduction.num_buckets:
            raise OtherRound(f"worker {self.link.peer}")
        if len(self._reduction.buckets) <= frame.bucket < self._reduction.num_buckets:
            return Refusal.DEFER
        raise Malformed(f"{frame.kind.name} of bucket {frame.bucket}, block {frame.block}, cannot come now")

    def _on_sum(self) -> None:
        block = self._sums.take().item
        assert isinstance(block, Block)
        self._reduction.on_sum(block)
        self.send_pieces()
        if block.bucket in self._reduction.layout.grouped:
            self._on_group()

    def _on_folded(self) -> None:
        stage = self._folded.take().item
        assert isinstance(stage, Stage)
        self._reduction.on_folded(stage, self.rank)
        self._on_group()

    def _on_pieces_frame(self) -> None:
        item = self._pieces.take().item
        if isinstance(item, Stage):
            if self._reduction.on_staged(item):
                self._on_group()
            return
        self._reduction.on_pieces(item)
        if item.owner == self._reduction.rank:
            self._on_pieces()
        else:
            self._on_group()

    def _is_part_of_header(self, frame: Frame) -> bool:
        """Whether a frame can begin the peer's header, or follow what has arrived of it."""
        if self.header is None:
            return frame.length >= self._status_bytes and frame.block <= MAX_HEADER_BYTES // MAX_HEADER_FRAME_BYTES
        return frame.block == self._num_parts - 1

    def _on_header(self, part: bytearray, num_parts: int) -> None:
        self.header = self.header or bytearray()
        self.header += part
        self._num_parts = num_parts
        if not num_parts:
            self.header_time = time.monotonic()
            self._has_header = True

    def _on_abort_frame(self) -> None:
        suspect, reason = decode_abort(self._abort)
        self._on_abort(self.link, suspect, reason)
