"""One data connection to a peer: frames out of a queue, frames in to where a sink wants them, never waiting."""

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Protocol

from resile_shared.errors import ResileError

from .exchange import Tag
from .frames import HEADER_BYTES, Frame, Kind, Malformed, decode

_GATHER_BYTES = 1 << 18
_GATHER_VIEWS = 64
_SCATTER_VIEWS = 512
_TRASH = memoryview(bytearray(1 << 16))


Place = tuple[list[memoryview], int, Callable[[], None]]
"""Where the payload of a frame goes, its bytes, and what to do when it is there."""


class Verdict(Enum):
    """What a sink says of a frame it has no place for."""

    PARK = "leave it unread for now"
    DISCARD = "read it and throw it away"


class Sink(Protocol):
    """Decides where the payloads of one link go."""

    def expected(self, header: bytearray) -> Place | None:
        """The place of a frame that is known by the bytes of its header; a short cut around ``place``."""
        return None

    def place(self, frame: Frame) -> Place | Verdict:
        """Where the payload of ``frame`` shall be written. Raises Malformed if this frame cannot come now."""


class Remains(Sink):
    """Takes what still comes when no round is open: frames that are stale are thrown away, others wait."""

    def __init__(self, stale: Callable[[Tag], bool]) -> None:
        self._stale = stale

    def place(self, frame: Frame) -> Verdict:
        """See ``Sink``."""
        return Verdict.DISCARD if self._stale(frame.tag) else Verdict.PARK


class BrokenLink(ResileError):
    """The connection to ``peer`` has ended, or carried garbage."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"the link to worker {peer} broke: {reason}")
        self.peer = peer
        self.reason = reason


class Link:
    """A connected, authenticated socket to ``peer``. Used by the main thread alone, but for ``retire``."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer = peer
        self.retired = False
        """Another thread has removed this link."""
        self.closed = False
        self.readable = True
        """Receiving is worth a try; cleared when the socket has run dry."""
        self.writable = True
        """Sending is worth a try; cleared when the socket is full."""
        self.parked = False
        """The next frame waits until the sink has a place for it."""
        self.listening = False
        """The operation under way wants to hear from this peer."""
        self.watched = 0
        """The events that the poller has been asked to report."""
        self.confirmed: Tag | None = None
        """The newest round that the peer has said to be committed."""
        self._socket = sock
        self._fd = sock.fileno()
        self._queue: deque[tuple[bytes | memoryview, ...]] = deque()
        self._notices: deque[tuple[bytes | memoryview, ...]] = deque()
        self._unsent: Sequence[bytes | memoryview] = ()
        self._unsent_bytes = 0
        self._header = bytearray(HEADER_BYTES)
        self._header_view = memoryview(self._header)
        self._header_missing = HEADER_BYTES
        self._into: list[memoryview] = []
        self._missing = 0
        self._arrived: Callable[[], None] | None = None
        """None while no payload is under way."""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._fd

    @property
    def pending(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._unsent or self._queue or self._notices)

    def send(self, *buffers: bytes | memoryview) -> None:
        """Queue one frame. The memory must stay as it is until the frame is sent or ``cut_short``."""
        self._queue.append(buffers)

    def notify(self, frame: bytes) -> None:
        """Queue a frame ahead of those of ``send``; it is sent even if they are cut short."""
        self._notices.append((frame,))

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self.writable and (self._unsent or self._gather()):
            try:
                sent = os.writev(self._fd, self._unsent)
            except BlockingIOError:
                self.writable = False
            except OSError as error:
                raise BrokenLink(self.peer, str(error)) from error
            else:
                if sent == self._unsent_bytes:
                    self._unsent = ()
                else:
                    self.writable = False
                    self._unsent = _rest(self._unsent, sent)
                    self._unsent_bytes -= sent

    def _gather(self) -> bool:
        """Take the next frames from the queue: one system call carries many small ones."""
        queue = self._notices or self._queue
        if not queue:
            return False
        unsent = queue.popleft()
        size = sum(map(len, unsent))
        while queue and size < _GATHER_BYTES and len(unsent) < _GATHER_VIEWS:
            frame = queue.popleft()
            unsent += frame
            size += sum(map(len, frame))
        self._unsent, self._unsent_bytes = unsent, size
        return True

    def receive(self, sink: Sink) -> None:
        """Read frames to where ``sink`` wants them until the socket runs dry or a frame has to wait."""
        try:
            while True:
                if self._arrived is None and not self._place(sink):
                    return
                while self._missing:
                    if not self._read():
                        return
                arrived, self._arrived = self._arrived, None
                if arrived is not None:
                    arrived()
        except Malformed as error:
            raise BrokenLink(self.peer, str(error)) from error

    def _place(self, sink: Sink) -> bool:
        """Find a place for the next frame, if its header is there."""
        while self._header_missing:
            if not self._read():
                return False
        place = sink.expected(self._header) or self._place_other(sink)
        if place is None:
            self.parked = True
            return False
        self._into, self._missing, self._arrived = place
        self._header_missing = HEADER_BYTES
        return True

    def _place_other(self, sink: Sink) -> Place | None:
        frame = decode(self._header)
        if frame.kind is Kind.CONFIRM:
            self.confirmed = max(frame.tag, self.confirmed or frame.tag)
            return [], 0, _nothing
        place = sink.place(frame)
        if place is Verdict.DISCARD:
            return _trash(frame.length), frame.length, _nothing
        return None if place is Verdict.PARK else place

    def _read(self) -> bool:
        """Read what is there of the payload under way, and in the same call of the header that follows it."""
        if not self.readable:
            return False
        into, missing = self._into, self._missing
        header = self._header_view[HEADER_BYTES - self._header_missing :]
        if len(into) > _SCATTER_VIEWS:
            views, wanted = into[:_SCATTER_VIEWS], 0
        else:
            views, wanted = [*into, header], missing + len(header)
        try:
            got = os.readv(self._fd, views)
        except BlockingIOError:
            self.readable = False
            return False
        except OSError as error:
            raise BrokenLink(self.peer, str(error)) from error
        if got == 0:
            raise BrokenLink(self.peer, "connection closed")
        self.readable = got >= wanted
        if got < missing:
            self._into = _rest(into, got)
            self._missing = missing - got
        else:
            self._into, self._missing = [], 0
            self._header_missing -= got - missing
        return True

    def unpark(self) -> None:
        """Offer the waiting frame to the sink again."""
        self.parked = False
        self.readable = True

    def cut_short(self) -> None:
        """Let go of all memory that is not the link's own.

        What is being sent is finished later from a copy and the frames behind it are dropped; what is still to come of
        the frame being received will be thrown away.
        """
        self._queue.clear()
        if self._unsent:
            self._unsent = [b"".join(self._unsent)]
        if self._arrived is not None:
            self._into, self._arrived = _trash(self._missing), _nothing

    def end_sending(self) -> None:
        """Tell the peer that nothing more will come."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def retire(self) -> None:
        """Cut the connection, from any thread: the main thread notices, and closes the socket."""
        self.retired = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. What is tried on the link afterwards fails like on a broken one."""
        self.closed = True
        self._fd = -1
        self._queue.clear()
        self._notices.clear()
        self._unsent = ()
        self._socket.close()


def _rest(views: Sequence[bytes | memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``done`` bytes."""
    for index, view in enumerate(views):
        if done < len(view):
            return [memoryview(view)[done:], *(memoryview(later) for later in views[index + 1 :])]
        done -= len(view)
    return []


def _trash(num_bytes: int) -> list[memoryview]:
    whole, rest = divmod(num_bytes, len(_TRASH))
    return [*[_TRASH] * whole, _TRASH[:rest]]


def _nothing() -> None:
    pass
