"""Another member of an open round: which frames are still to come from it, which are due to it, and where they go."""

import time
from collections.abc import Callable, Sequence

from .frames import Frame, Kind, Malformed, decode_abort, encode_tag
from .layout import WINDOW, Transfer
from .link import Destination, Link, Refusal, Sink
from .reduction import Reduction
from .spec import Tag


class RoundPeer(Sink):
    """One member as seen by the round of another.

    Calls ``on_block`` when all pieces of an own block have arrived, ``on_abort`` when the peer has aborted the round.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        tag: Tag,
        reduction: Reduction,
        *,
        on_block: Callable[[Transfer], None],
        on_abort: Callable[[Link, int, str], None],
    ) -> None:
        self.link = link
        self.rank = rank
        self.header: bytearray | None = None
        self.header_time = 0.0
        """When its header had arrived, on the monotonic clock."""
        self._tag = tag
        self._encoded_tag = encode_tag(tag)
        self._reduction = reduction
        self._on_block = on_block
        self._on_abort = on_abort
        self._is_closed = False
        self._route = reduction.layout.routes[rank]
        self._pieces_sent = 0
        self._pieces_received = 0
        self._sums_received = 0
        self._next_pieces = self._header_of(self._route.pieces_in, 0)
        self._next_sum = self._header_of(self._route.sums_in, 0)
        self._abort = bytearray()
        self.num_expected = len(self._route.pieces_in) + len(self._route.sums_in) + 1
        """Frames of this round still to come from it."""

    def close(self) -> None:
        """Release the memory of the round; what still comes of it is deferred."""
        self._is_closed = True
        self.link.drop_buffers()

    def send_pieces(self) -> None:
        """Queue own pieces of its next blocks, as far as buckets are pushed and it has room."""
        pieces, buckets = self._route.pieces_out, self._reduction.buckets
        while self._pieces_sent < len(pieces):
            block, content = pieces[self._pieces_sent]
            if block.bucket >= len(buckets) or block.turn >= self._sums_received + WINDOW:
                return
            self._pieces_sent += 1
            bucket = buckets[block.bucket]
            if block.shared:
                parts = [partial[block.low : block.high] for partial in bucket.partials_bytes]
                self.link.send(self._encoded_tag + content, *parts)
            else:
                self.link.send(self._encoded_tag + content, bucket.own_pieces)

    def expected(self, header: bytearray) -> Destination | None:
        """See ``Sink``."""
        reduction = self._reduction
        if header == self._next_sum:
            block, _ = self._route.sums_in[self._sums_received]
            if block.bucket < len(reduction.buckets) and not self._is_closed:
                memory = reduction.sum_memory(block)
                return [memory], len(memory), self._on_sum
        elif header == self._next_pieces:
            block, _ = self._route.pieces_in[self._pieces_received]
            if block.bucket < len(reduction.buckets) and not self._is_closed and reduction.has_room(block):
                memory = reduction.pieces_memory(block, self.rank)
                return [memory], len(memory), self._on_pieces
        return None

    def accept(self, frame: Frame) -> Destination | Refusal:
        """See ``Sink``."""
        if self._is_closed:
            return Refusal.DEFER
        if frame.kind in (Kind.SKELETON, Kind.STATE):
            # The rest of a state transfer that was abandoned is stale.
            return Refusal.DISCARD if frame.tag.generation <= self._tag.generation else Refusal.DEFER
        if frame.tag != self._tag:
            return Refusal.DISCARD if frame.tag < self._tag else Refusal.DEFER
        if frame.kind is Kind.HEADER and self.header is None:
            self.header = bytearray(frame.length)
            return [memoryview(self.header)], frame.length, self._on_header
        if frame.kind is Kind.ABORT:
            self._abort = bytearray(frame.length)
            return [memoryview(self._abort)], frame.length, self._on_abort_frame
        if len(self._reduction.buckets) <= frame.bucket < self._reduction.num_buckets:
            return Refusal.DEFER
        raise Malformed(f"{frame.kind.name} of bucket {frame.bucket}, block {frame.block}, cannot come now")

    def _on_sum(self) -> None:
        self.num_expected -= 1
        self._sums_received += 1
        self._next_sum = self._header_of(self._route.sums_in, self._sums_received)
        self.send_pieces()

    def _on_pieces(self) -> None:
        self.num_expected -= 1
        number = self._pieces_received
        self._pieces_received += 1
        self._next_pieces = self._header_of(self._route.pieces_in, self._pieces_received)
        if self._reduction.count_pieces(number):
            self._on_block(self._reduction.layout.blocks[number])

    def _on_header(self) -> None:
        self.header_time = time.monotonic()
        self.num_expected -= 1

    def _on_abort_frame(self) -> None:
        suspect, reason = decode_abort(self._abort)
        self._on_abort(self.link, suspect, reason)

    def _header_of(self, transfers: Sequence[Transfer], number: int) -> bytes:
        return self._encoded_tag + transfers[number].content if number < len(transfers) else b""
