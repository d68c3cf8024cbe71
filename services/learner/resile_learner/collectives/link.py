"""One data connection to a peer: sends queued frames, receives frames to where a sink wants them, and never blocks."""

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from resile_shared.errors import ResileError

from .frames import HEADER_BYTES, Frame, Kind, Malformed, decode
from .spec import Tag
from .transport import Traffic, Transport

_GATHER_BYTES = 1 << 18
_GATHER_VIEWS = 64
_SCATTER_VIEWS = 512
_DISCARDED = memoryview(bytearray(1 << 16))


Destination = tuple[list[memoryview], int, Callable[[], None]]
"""Where the payload of a frame is written, its size in bytes, and what to call when it is complete."""


class Refusal(Enum):
    """What happens to a frame for which a sink has no destination."""

    DEFER = "it stays unread for now"
    DISCARD = "it is read and dropped"


class Sink(Protocol):
    """Decides where the payloads of one link are written."""

    def expected(self, header: bytearray) -> Destination | None:
        """The destination of a frame whose header, as bytes, was known in advance; a shortcut around ``accept``."""
        return None

    def accept(self, frame: Frame) -> Destination | Refusal:
        """The destination of ``frame``. Raises Malformed if this frame is not allowed now."""


class DrainSink(Sink):
    """Discards frames of stale rounds and defers all others."""

    def __init__(self, newest: Tag | None) -> None:
        self._newest = newest

    def accept(self, frame: Frame) -> Refusal:
        """See ``Sink``."""
        return Refusal.DISCARD if self._newest is not None and frame.tag <= self._newest else Refusal.DEFER


class DiscardSink(Sink):
    """Discards every frame."""

    def accept(self, frame: Frame) -> Refusal:
        """See ``Sink``."""
        return Refusal.DISCARD


class BrokenLink(ResileError):
    """The connection to ``peer`` has ended, or carried invalid frames."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(f"the link to worker {peer} broke: {reason}")
        self.peer = peer
        self.reason = reason


class Link:
    """A connected, authenticated transport to ``peer``. Only the main thread uses it, except for ``remove``."""

    def __init__(self, peer: int, transport: Transport) -> None:
        self.peer = peer
        self.removed = False
        """Whether another thread has removed this link."""
        self.closed = False
        self.readable = True
        """Whether receiving may succeed; False once the transport has nothing more."""
        self.writable = True
        """Whether sending may succeed; False once the transport is full."""
        self.paused = False
        """Whether the next frame is deferred until the sink has a destination for it."""
        self.receiving = False
        """Whether the current operation receives from this peer."""
        self.watched_events = 0
        """The events for which the poller has registered this link."""
        self.confirmed: Tag | None = None
        """The newest round that the peer has confirmed as committed."""
        self._transport = transport
        self._queue: deque[tuple[bytes | memoryview, ...]] = deque()
        self._urgent: deque[tuple[bytes | memoryview, ...]] = deque()
        self._unsent: Sequence[bytes | memoryview] = ()
        self._unsent_bytes = 0
        self._header = bytearray(HEADER_BYTES)
        self._header_view = memoryview(self._header)
        self._header_missing = HEADER_BYTES
        self._into: list[memoryview] = []
        self._missing = 0
        self._on_complete: Callable[[], None] | None = None
        """Called when the current payload is complete; None between a payload and the next header."""

    def fileno(self) -> int:
        """See ``Transport.fileno``."""
        return self._transport.fileno()

    def unacknowledged_seconds(self) -> float:
        """See ``Transport.unacknowledged_seconds``."""
        return self._transport.unacknowledged_seconds()

    def traffic(self) -> Traffic:
        """See ``Transport.traffic``."""
        return self._transport.traffic()

    @property
    def pending(self) -> bool:
        """Whether something remains to be sent."""
        return bool(self._unsent or self._queue or self._urgent)

    def send(self, *buffers: bytes | memoryview) -> None:
        """Queue one frame. The memory must not change until the frame is sent or ``drop_buffers`` is called."""
        self._queue.append(buffers)

    def send_urgent(self, frame: bytes) -> None:
        """Queue a frame ahead of those of ``send``; ``drop_buffers`` keeps it."""
        self._urgent.append((frame,))

    def flush(self) -> None:
        """Send what the transport takes now. Raises BrokenLink."""
        while self.writable and (self._unsent or self._gather()):
            try:
                sent = self._transport.send(self._unsent)
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
        """Take the next frames from the queue: one call carries many small ones."""
        queue = self._urgent or self._queue
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
        """Read frames to where ``sink`` wants them until nothing is left or a frame is deferred. Raises BrokenLink."""
        try:
            while True:
                if self._on_complete is None and not self._begin_frame(sink):
                    return
                while self._missing:
                    if not self._read():
                        return
                on_complete, self._on_complete = self._on_complete, None
                if on_complete is not None:
                    on_complete()
        except Malformed as error:
            raise BrokenLink(self.peer, str(error)) from error

    def _begin_frame(self, sink: Sink) -> bool:
        """Find the destination of the next frame, if its header has arrived."""
        while self._header_missing:
            if not self._read():
                return False
        destination = sink.expected(self._header) or self._accept(sink)
        if destination is None:
            self.paused = True
            return False
        self._into, self._missing, self._on_complete = destination
        self._header_missing = HEADER_BYTES
        return True

    def _accept(self, sink: Sink) -> Destination | None:
        frame = decode(self._header)
        if frame.kind is Kind.CONFIRM:
            self.confirmed = max(frame.tag, self.confirmed or frame.tag)
            return [], 0, _do_nothing
        destination = sink.accept(frame)
        if destination is Refusal.DISCARD:
            return _discarded(frame.length), frame.length, _do_nothing
        return None if destination is Refusal.DEFER else destination

    def _read(self) -> bool:
        """Read what has arrived of the current payload, and in the same call of the header that follows it."""
        if not self.readable:
            return False
        into, missing = self._into, self._missing
        header = self._header_view[HEADER_BYTES - self._header_missing :]
        if len(into) > _SCATTER_VIEWS:
            views, wanted = into[:_SCATTER_VIEWS], 0
        else:
            views, wanted = [*into, header], missing + len(header)
        try:
            received = self._transport.receive(views)
        except BlockingIOError:
            self.readable = False
            return False
        except OSError as error:
            raise BrokenLink(self.peer, str(error)) from error
        if received == 0:
            raise BrokenLink(self.peer, "connection closed")
        self.readable = received >= wanted
        if received < missing:
            self._into = _rest(into, received)
            self._missing = missing - received
        else:
            self._into, self._missing = [], 0
            self._header_missing -= received - missing
        return True

    def resume(self) -> None:
        """Offer the deferred frame to the sink again."""
        self.paused = False
        self.readable = True

    def drop_buffers(self) -> None:
        """Release all memory that the link does not own.

        The rest of the frames being sent is copied and sent later, and the frames behind them are dropped; the rest of
        the frame being received will be discarded.
        """
        self._queue.clear()
        if self._unsent:
            self._unsent = [b"".join(self._unsent)]
        if self._on_complete is not None:
            self._into, self._on_complete = _discarded(self._missing), _do_nothing

    def write_eof(self) -> None:
        """Show the peer that nothing more follows."""
        self._transport.write_eof()

    def remove(self) -> None:
        """Break the connection, from any thread; the main thread closes it later."""
        self.removed = True
        self._transport.abort()

    def close(self) -> None:
        """Close the transport. Later calls fail as on a broken link."""
        self.closed = True
        self._queue.clear()
        self._urgent.clear()
        self._unsent = ()
        self._transport.close()


def _rest(views: Sequence[bytes | memoryview], done: int) -> list[memoryview]:
    """What remains of ``views`` after their first ``done`` bytes."""
    for index, view in enumerate(views):
        if done < len(view):
            return [memoryview(view)[done:], *(memoryview(later) for later in views[index + 1 :])]
        done -= len(view)
    return []


def _discarded(num_bytes: int) -> list[memoryview]:
    """Memory into which ``num_bytes`` are read to be discarded."""
    whole, rest = divmod(num_bytes, len(_DISCARDED))
    return [*[_DISCARDED] * whole, _DISCARDED[:rest]]


def _do_nothing() -> None:
    pass
