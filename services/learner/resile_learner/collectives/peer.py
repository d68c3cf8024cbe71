"""Another member of an open round: what it owes us, what we owe it, and where its frames go."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .exchange import Tag
from .frames import Frame, Kind, Malformed, decode_abort, encode_tag
from .layout import WINDOW, Transfer
from .link import Link, Place, Sink, Verdict

if TYPE_CHECKING:
    from .round import OpenMeshRound


class Peer(Sink):
    """One member as seen by the round of another."""

    def __init__(self, round_: "OpenMeshRound", link: Link, rank: int, tag: Tag) -> None:
        self.link = link
        self.rank = rank
        self.header: bytearray | None = None
        self.header_time = 0.0
        """When its header had arrived, on the monotonic clock."""
        self._round = round_
        self._tag = tag
        self._first_half = encode_tag(tag)
        self._route = round_.layout.routes[rank]
        self._pieces_sent = 0
        self._pieces_received = 0
        self._sums_received = 0
        self._next_pieces = self._header_of(self._route.pieces_in, 0)
        self._next_sum = self._header_of(self._route.sums_in, 0)
        self._abort = bytearray()
        self.owed = len(self._route.pieces_in) + len(self._route.sums_in) + 1
        """Frames of this round still to come from it."""

    def send_pieces(self) -> None:
        """Queue our pieces of its next blocks, as far as buckets are pushed and it has room."""
        pieces, buckets = self._route.pieces_out, self._round.buckets
        while self._pieces_sent < len(pieces):
            block, content = pieces[self._pieces_sent]
            if block.bucket >= len(buckets) or block.turn >= self._sums_received + WINDOW:
                return
            self._pieces_sent += 1
            bucket = buckets[block.bucket]
            if block.shared:
                parts = [partial[block.low : block.high] for partial in bucket.partials_bytes]
                self.link.send(self._first_half + content, *parts)
            else:
                self.link.send(self._first_half + content, bucket.own_pieces)

    def expected(self, header: bytearray) -> Place | None:
        """See ``Sink``."""
        round_ = self._round
        if header == self._next_sum:
            block, _ = self._route.sums_in[self._sums_received]
            if block.bucket < len(round_.buckets) and not round_.closed:
                memory = round_.buckets[block.bucket].sums_bytes[block.low : block.high]
                return [memory], len(memory), self._sum_arrived
        elif header == self._next_pieces:
            block, _ = self._route.pieces_in[self._pieces_received]
            if block.bucket < len(round_.buckets) and not round_.closed and round_.has_room(block):
                memory = round_.place_pieces(block, self.rank)
                return [memory], len(memory), self._pieces_arrived
        return None

    def place(self, frame: Frame) -> Place | Verdict:
        """See ``Sink``."""
        if self._round.closed:
            return Verdict.PARK
        if frame.kind in (Kind.SKELETON, Kind.STATE):
            # What is left of a hand-over that was given up is of no more use.
            return Verdict.DISCARD if frame.tag.generation <= self._tag.generation else Verdict.PARK
        if frame.tag != self._tag:
            return Verdict.DISCARD if frame.tag < self._tag else Verdict.PARK
        if frame.kind is Kind.HEADER and self.header is None:
            self.header = bytearray(frame.length)
            return [memoryview(self.header)], frame.length, self._header_arrived
        if frame.kind is Kind.ABORT:
            self._abort = bytearray(frame.length)
            return [memoryview(self._abort)], frame.length, self._abort_arrived
        if len(self._round.buckets) <= frame.bucket < self._round.num_buckets:
            return Verdict.PARK
        raise Malformed(f"{frame.kind.name} of bucket {frame.bucket}, block {frame.block}, cannot come now")

    def _sum_arrived(self) -> None:
        self.owed -= 1
        self._sums_received += 1
        self._next_sum = self._header_of(self._route.sums_in, self._sums_received)
        self.send_pieces()

    def _pieces_arrived(self) -> None:
        self.owed -= 1
        number = self._pieces_received
        self._pieces_received += 1
        self._next_pieces = self._header_of(self._route.pieces_in, self._pieces_received)
        self._round.pieces_arrived(number)

    def _header_arrived(self) -> None:
        self.header_time = time.monotonic()
        self.owed -= 1

    def _abort_arrived(self) -> None:
        suspect, reason = decode_abort(self._abort)
        self._round.fail(suspect, reason, told_by=self.link)

    def _header_of(self, transfers: Sequence[Transfer], number: int) -> bytes:
        return self._first_half + transfers[number].content if number < len(transfers) else b""
