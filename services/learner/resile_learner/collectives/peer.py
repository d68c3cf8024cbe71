"""Another member of an open round: which frames are still to come from it, which are due to it, and where they go."""

import time
from collections.abc import Callable, Sequence

from .frames import Frame, Kind, Malformed, decode_abort, encode_tag
from .layout import WINDOW, Block, Part, Transfer
from .link import Destination, Link, Refusal, Sink
from .reduction import Reduction
from .spec import OtherRound, Tag


class RoundPeer(Sink):
    """One member as seen by the round of another.

    Calls ``on_block`` when all pieces of an own block are here, ``on_stage`` when the peer has folded a stage, and
    ``on_abort`` when it has aborted the round. Its header begins with ``status_bytes`` of the exchange's own.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        tag: Tag,
        reduction: Reduction,
        *,
        status_bytes: int,
        on_block: Callable[[Block], None],
        on_stage: Callable[[], None],
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
        self._status_bytes = status_bytes
        self._on_block = on_block
        self._on_stage = on_stage
        self._on_abort = on_abort
        self._is_closed = False
        self._route = reduction.layout.routes[rank]
        self._pieces_sent = 0
        self._pieces_received = 0
        self._sums_received = 0
        self._blocks_summed = 0
        """Shared blocks whose sums have come."""
        self.stages_folded = 0
        """Stages whose sums have been read from its segment."""
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
            item, content = pieces[self._pieces_sent]
            if item.bucket >= len(buckets):
                return
            header = self._encoded_tag + content
            if isinstance(item, Part):
                if item.stage >= self._reduction.num_staged:
                    return
                self.link.send(header)
            elif item.turn >= self._blocks_summed + WINDOW:
                return
            elif item.shared:
                parts = [partial[item.low : item.high] for partial in buckets[item.bucket].partials_bytes]
                self.link.send(header, *parts)
            else:
                self.link.send(header, buckets[item.bucket].own_pieces)
            self._pieces_sent += 1

    def expected(self, header: bytearray) -> Destination | None:
        """See ``Sink``."""
        reduction = self._reduction
        if header == self._next_sum:
            item, _ = self._route.sums_in[self._sums_received]
            if item.bucket < len(reduction.buckets) and not self._is_closed:
                if isinstance(item, Part):
                    return [], 0, self._on_folded
                memory = reduction.sum_memory(item)
                return [memory], len(memory), self._on_sum
        elif header == self._next_pieces:
            item, _ = self._route.pieces_in[self._pieces_received]
            if item.bucket < len(reduction.buckets) and not self._is_closed:
                if isinstance(item, Part):
                    return [], 0, self._on_pieces
                if reduction.has_room(item):
                    memory = reduction.pieces_memory(item, self.rank)
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
        if frame.kind is Kind.HEADER and self.header is None and frame.length >= self._status_bytes:
            self.header = bytearray(frame.length)
            return [memoryview(self.header)], frame.length, self._on_header
        if frame.kind is Kind.ABORT:
            self._abort = bytearray(frame.length)
            return [memoryview(self._abort)], frame.length, self._on_abort_frame
        if frame.kind in (Kind.PIECES, Kind.STAGED) and not self._reduction.num_buckets:
            raise OtherRound(f"worker {self.link.peer}")
        if len(self._reduction.buckets) <= frame.bucket < self._reduction.num_buckets:
            return Refusal.DEFER
        raise Malformed(f"{frame.kind.name} of bucket {frame.bucket}, block {frame.block}, cannot come now")

    def _on_sum(self) -> None:
        self._count_sums(1)
        self.send_pieces()

    def _on_folded(self) -> None:
        item, _ = self._route.sums_in[self._sums_received]
        assert isinstance(item, Part)
        self._reduction.read_sums(item, self.rank)
        self.stages_folded += 1
        self._count_sums(len(item.blocks))
        self._on_stage()

    def _count_sums(self, num_blocks: int) -> None:
        self.num_expected -= 1
        self._blocks_summed += num_blocks
        self._sums_received += 1
        self._next_sum = self._header_of(self._route.sums_in, self._sums_received)

    def _on_pieces(self) -> None:
        item, _ = self._route.pieces_in[self._pieces_received]
        self.num_expected -= 1
        self._pieces_received += 1
        self._next_pieces = self._header_of(self._route.pieces_in, self._pieces_received)
        for block in item.blocks if isinstance(item, Part) else (item,):
            if self._reduction.count_pieces(block):
                self._on_block(block)

    def _on_header(self) -> None:
        self.header_time = time.monotonic()
        self.num_expected -= 1

    def _on_abort_frame(self) -> None:
        suspect, reason = decode_abort(self._abort)
        self._on_abort(self.link, suspect, reason)

    def _header_of(self, transfers: Sequence[Transfer], number: int) -> bytes:
        return self._encoded_tag + transfers[number].content if number < len(transfers) else b""
