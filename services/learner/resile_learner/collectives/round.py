"""One round under way: pieces out to the ranks that fold them, sums back from them, all by the calling thread.

It cannot deadlock, because of four rules:

1. A member sends pieces to another only when it has received from it the sum of what it sent ``WINDOW`` blocks before.
   So in ``finish``, when all buckets are pushed, there is room for every frame of this round that can arrive: no member
   stops reading its links, and an ABORT always arrives.
2. Pieces depend on the sender's own compute; those from the head of a group depend on a stage that the whole group has
   announced, and those from the head of a rack on the pieces of its groups. A sum depends on pieces, or on the sum that
   a head receives. A stage depends on compute, and on the sums of the stage ``NUM_STAGE_BUFFERS`` before it.
3. Between any two members all blocks go in the same order, and so do all stages in a group. So the oldest block whose
   sum has not arrived everywhere can always be completed.
4. Frames that a member defers (of a bucket it has not pushed, of a later round) wait for its own compute, never for
   another member.

Each half of a segment has one rule for its buffers. Pieces may be overwritten when all heads of the group have sent
FOLDED for the older stage, since they have then read them. Results may be overwritten when all partners have announced
the newer stage: before it copied that stage, each had to read the sums of the older one. The same holds between rounds,
whose groups only grow as long as they use the same segments (`MemoryAgreement`). A member that leaves announces no
newer stage. It sends its header after it has read everything, so members that have completed its last round may
overwrite anything.
"""

import time
from collections.abc import Callable
from functools import partial

from .bucket_memory import Scratch
from .frames import MAX_HEADER_BYTES, Kind, Malformed, encode_abort, encode_header, encode_tag
from .link import BrokenLink, DrainSink, Link
from .memory_agreement import MemoryAgreement
from .peer import RoundPeer
from .poller import LinkPoller
from .reduction import Reduction
from .spec import Abandoned, RoundSpec
from .transport import Traffic

DRAIN_TIMEOUT_MS = 500


class LinkRounds:
    """Opens the rounds of ``worker``. For the main thread; other threads end a round by ``LinkPoller.abort_round``."""

    def __init__(self, poller: LinkPoller, worker: int, agreement: MemoryAgreement | None = None) -> None:
        self._poller = poller
        self._worker = worker
        self._scratch = Scratch()
        self._agreement = agreement or MemoryAgreement(worker)

    def begin(self, spec: RoundSpec) -> "LinkRound":
        """Open the next round. At most one is open at a time: one that was left unfinished is abandoned."""
        return LinkRound(self._poller, self._scratch, self._agreement, spec, self._worker)


class LinkRound:
    """A round under way over links. `ExchangeRound` (exchange.py) has one, also where devices carry the sums."""

    def __init__(
        self, poller: LinkPoller, scratch: Scratch, agreement: MemoryAgreement, spec: RoundSpec, worker: int
    ) -> None:
        self.rank = spec.members.index(worker)
        self.last = (self.rank, 0.0)
        """After `finish`: the rank whose header arrived last, and the seconds for which only that one was missing."""
        self._spec = spec
        self._encoded_tag = encode_tag(spec.tag)
        self._poller = poller
        self._agreement = agreement
        self._peers: list[RoundPeer] = []
        self._is_closed = False
        self._failure: Abandoned | None = None
        poller.begin_operation(partial(self._fail, worker, "it left the round open"))
        poller.newest_tag = spec.tag
        memory = agreement.begin(spec)
        self._status_bytes = agreement.status_bytes
        self.path = agreement.path
        """Human-readable description of how gradients are exchanged."""
        self._reduction = Reduction(scratch, spec, self.rank, memory)
        self._connect()

    def push(self, bucket: int) -> None:
        """Take this worker's partial sums of ``bucket`` as final, and move what can be moved without waiting.

        Buckets are pushed in order, 0 first. Called from gradient hooks during the backward pass. ``finish`` reports a
        lost member.
        """
        reduction = self._reduction
        if bucket != len(reduction.buckets):
            raise ValueError(f"bucket {bucket} pushed when {len(reduction.buckets)} is next")
        reduction.push(bucket)
        self._check_abort()
        if self._failure is not None:
            return
        for peer in self._peers:
            peer.link.resume()
        self._advance()
        if bucket not in reduction.layout.direct:  # a small one is sent together with the next
            self._progress()

    def finish(self, header: bytes, *, may_leave: bool = False) -> tuple[bytes, ...]:
        """Send ``header`` to every member, wait until all sums are final, and return all headers by rank.

        A member that ``may_leave`` after this round first reads all that it needs of the others' memory.
        Every bucket must have been pushed. Raises Abandoned when a member is lost or aborts.
        """
        num_pushed, num_buckets = len(self._reduction.buckets), self._reduction.num_buckets
        if num_pushed != num_buckets:
            raise ValueError(f"finished with {num_pushed} of {num_buckets} buckets pushed")
        most = MAX_HEADER_BYTES - self._status_bytes
        if len(header) > most:
            raise ValueError(f"a header of {len(header)} bytes; at most {most} are allowed")
        begun = time.monotonic()
        try:
            if self._failure is not None:
                raise self._failure
            status = self._agreement.status(self._traffic)
            frames = encode_header(self._spec.tag, status + header)
            # It announces no later stage, so the header is what tells the others that it has read everything.
            if may_leave:
                self._run(lambda: self._reduction.has_read and all(peer.has_sums for peer in self._peers))
            for peer in self._peers:
                peer.link.send(frames)
            self._run(lambda: all(not peer.num_expected and not peer.link.pending for peer in self._peers))
            self.last = self._last_header(begun)
            headers = {peer.rank: bytes(peer.header or b"") for peer in self._peers} | {self.rank: status + header}
            ordered = [headers[rank] for rank in range(len(headers))]
            self._agreement.on_statuses([one[: len(status)] for one in ordered])
        except BaseException as error:
            self._leave(error)
            raise
        self._end()
        return tuple(one[len(status) :] for one in ordered)

    def withdraw(self) -> None:
        """End the round. Nothing of it was pushed or sent, so another round may have its tag."""
        self._end()

    def progress_until(self, done: Callable[[], bool], *, seconds: float) -> None:
        """Before `finish`: receive what others send until ``done()``, which is checked after each wake of the poller.

        Returns after ``seconds`` at the latest. Raises Abandoned when a member is lost or aborts.
        """
        deadline = time.monotonic() + seconds
        try:
            while not done() and (left := deadline - time.monotonic()) > 0:
                self._step()
                if not done():
                    self._poller.wait(timeout_ms=int(left * 1000) + 1)
        except BaseException as error:
            self._leave(error)
            raise

    @property
    def members(self) -> tuple[int, ...]:
        """Worker ids in rank order."""
        return self._spec.members

    @property
    def received(self) -> list[bytes]:
        """The headers of other members that have arrived."""
        return [bytes(peer.header or b"")[self._status_bytes :] for peer in self._peers if peer.header_time]

    @property
    def missing(self) -> tuple[int, ...]:
        """The members whose headers have not arrived. From any thread, while `finish` waits."""
        return tuple(sorted(self._spec.members[peer.rank] for peer in self._peers if not peer.header_time))

    def _traffic(self) -> dict[int, Traffic]:
        """What was sent to each other member."""
        return {link.peer: link.traffic() for link in self._poller.links_to(self._spec.members)}

    def _last_header(self, begun: float) -> tuple[int, float]:
        """The rank whose header arrived last, and how long after all others and the beginning of the wait."""
        if not self._peers:
            return self.rank, 0.0
        last = max(self._peers, key=lambda peer: peer.header_time)
        before = max((peer.header_time for peer in self._peers if peer is not last), default=begun)
        return last.rank, max(0.0, last.header_time - max(before, begun))

    def _leave(self, error: BaseException) -> None:
        self._fail(self._spec.members[self.rank], f"it left the round: {error!r}")
        self._drain()
        self._end()

    def _end(self) -> None:
        self._close()
        self._peers = []  # they refer back to this round, which holds the tensors

    def _close(self) -> None:
        """Release all memory of the round; links stay usable."""
        if not self._is_closed:
            self._is_closed = True
            self._reduction.release_segments()
            for peer in self._peers:
                peer.close()

    def _fail(self, suspect: int, reason: str, *, reporter: Link | None = None, is_hearsay: bool = False) -> None:
        """End the round without a result and send ABORT to the other members, except to ``reporter``."""
        if self._is_closed:
            return
        self._close()
        self._agreement.end()
        self._failure = Abandoned(suspect, reason, is_hearsay=is_hearsay)
        frame = encode_abort(self._spec.tag, suspect=suspect, reason=reason)
        for link in [peer.link for peer in self._peers]:
            if link is not reporter and not link.removed and not link.closed:
                link.send_urgent(frame)
                self._poller.flush(link)

    def _connect(self) -> None:
        members, links = self._spec.members, self._poller.links
        # Each rank starts with its right neighbour, so that not everyone sends to the same member first.
        ranks = [*range(self.rank + 1, len(members)), *range(self.rank)]
        missing = [members[rank] for rank in ranks if members[rank] not in links]
        self._peers = [
            RoundPeer(
                links[members[rank]],
                rank,
                self._spec.tag,
                self._reduction,
                status_bytes=self._status_bytes,
                on_pieces=self._fold,
                on_group=self._advance,
                on_abort=self._on_abort,
            )
            for rank in ranks
            if members[rank] in links
        ]
        self._poller.receive_from(())
        self._poller.receive_from([peer.link for peer in self._peers])
        if missing:
            self._fail(missing[0], "there is no link to it")
        self._check_abort()

    def _run(self, done: Callable[[], bool]) -> None:
        while True:
            self._step()
            if done():
                return
            self._poller.wait()

    def _step(self) -> None:
        """Receive and send what is possible without waiting. Raises Abandoned once the round has failed."""
        if self._poller.poll():
            self._check_abort()
        self._progress()
        if self._failure is not None:
            raise self._failure

    def _check_abort(self) -> None:
        """Fail if another thread has requested it or has removed a link."""
        request = self._poller.take_abort_request(generation=self._spec.tag.generation, members=self._spec.members)
        if request is not None:
            self._fail(request.suspect, request.reason, is_hearsay=True)
        for peer in self._peers:
            if peer.link.removed:
                self._fail(peer.link.peer, "its link was removed")

    def _on_abort(self, link: Link, suspect: int, reason: str) -> None:
        if suspect not in self._spec.members:
            raise Malformed(f"an ABORT frame names worker {suspect}, which is no member")
        self._fail(suspect, reason, reporter=link, is_hearsay=True)

    def _progress(self) -> None:
        """Receive and send what is possible without waiting."""
        while self._failure is None and any([self._progress_with(peer) for peer in self._peers]):  # noqa: C419 - all, not the first
            pass

    def _progress_with(self, peer: RoundPeer) -> bool:
        """Receive and send once; return whether either was possible."""
        link = peer.link
        receives = link.readable and link.receiving and not link.paused and self._failure is None
        if receives:
            self._receive(peer)
        sends = link.writable and link.pending and self._failure is None
        if sends:
            self._flush(peer)
        return receives or sends

    def _receive(self, peer: RoundPeer) -> None:
        try:
            peer.link.receive(peer)
        except BrokenLink as broken:
            self._lose(peer, broken)

    def _flush(self, peer: RoundPeer) -> None:
        try:
            peer.link.flush()
        except BrokenLink as broken:
            self._lose(peer, broken)

    def _lose(self, peer: RoundPeer, broken: BrokenLink) -> None:
        if peer.num_expected or peer.link.pending:
            self._poller.drop(peer.link)
            self._fail(broken.peer, broken.reason)
        else:
            # It has sent and received all frames of this round; the next one will find it gone.
            peer.link.receiving = False

    def _drain(self) -> None:
        """Wait until the others have received the rest of what was being sent to them and the ABORT behind it.

        Frames of this round are discarded, since their senders may wait for the same. A member that receives nothing
        for a while has stopped; it gets the rest during this worker's next operation.
        """
        poller, drain = self._poller, DrainSink(self._spec.tag)
        links = [peer.link for peer in self._peers]
        poller.receive_from(())
        poller.receive_from(links)
        while True:
            for link in links:
                poller.progress(link, drain)
            if not any(link.pending and not link.removed for link in links):
                return
            if not poller.wait(timeout_ms=DRAIN_TIMEOUT_MS):
                return

    def _advance(self) -> None:
        """Fold, publish and send what can be. In a group each may wait for another member's pieces or sums."""
        self._fold()
        self._send_pieces()

    def _send_pieces(self) -> None:
        """Announce and send own pieces as far as there is room for them."""
        if self._failure is not None:
            return
        reduction = self._reduction
        while reduction.can_stage():
            reduction.stage()
        for peer in self._peers:
            peer.send_pieces()

    def _fold(self) -> None:
        """Fold the own blocks whose pieces are all here, send the sums that are here, and publish them in the group."""
        while self._failure is None and (block := self._reduction.next_complete()) is not None:
            self._reduction.fold(block)
            self._send_sums()
        self._send_sums()
        self._publish()

    def _send_sums(self) -> None:
        for peer in self._peers:
            if peer.send_sums():
                self._flush(peer)

    def _publish(self) -> None:
        """Tell the partners which sums they can read."""
        while (stage := self._reduction.next_published()) is not None:
            for peer in self._peers:
                if peer.rank in self._reduction.layout.partners:
                    peer.link.send(self._encoded_tag + stage.content(Kind.FOLDED))
                    self._flush(peer)
