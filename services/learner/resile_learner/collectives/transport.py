"""What carries the bytes of a link: today a TCP connection."""

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

_INFO = struct.Struct("=3xB20xI28xI")
"""Fields of Linux's ``struct tcp_info``: tcpi_probes, tcpi_unacked, tcpi_last_ack_recv."""
_TRAFFIC = struct.Struct("=120xQ40xQQ")
"""Fields of Linux's ``struct tcp_info``: tcpi_bytes_acked, tcpi_busy_time, tcpi_rwnd_limited."""
_LOST_PROBES = 3
"""This many unanswered probes of a full receiver mean a broken path; it need not answer each one."""


class Traffic(NamedTuple):
    """What a connection has sent since it was made."""

    num_bytes: int = 0
    """Number of bytes that the other side has confirmed."""
    microseconds: int = 0
    """Time in which bytes were in flight and the other side had room for them."""

    def rate_since(self, earlier: "Traffic") -> int:
        """Bytes per second that the network has carried since ``earlier``; 0 if nothing was sent."""
        microseconds = self.microseconds - earlier.microseconds
        return (self.num_bytes - earlier.num_bytes) * 1_000_000 // microseconds if microseconds > 0 else 0


class Transport(Protocol):
    """A connected byte stream to one peer, whose calls never block. The main thread uses it, except for ``abort``.

    ``send`` and ``receive`` take many buffers at once, so that one call carries many small frames. Both raise
    BlockingIOError when they must wait, and any other OSError when the connection is broken or closed.
    """

    def fileno(self) -> int:
        """The descriptor that ``poll`` reports as writable when ``send``, as readable when ``receive`` can go on."""

    def send(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """Send from the beginning of ``buffers``; return how many bytes were taken."""

    def receive(self, buffers: Sequence[memoryview], /) -> int:
        """Fill ``buffers`` from the beginning; return how many bytes were received, 0 at the end of the stream."""

    def unacknowledged_seconds(self) -> float:
        """Seconds for which nothing has confirmed what was sent; 0 when nothing is awaited. From any thread."""

    def traffic(self) -> Traffic:
        """What was sent so far; nothing if the system does not count it."""

    def write_eof(self) -> None:
        """Show the peer the end of the stream after what was sent; receiving continues."""

    def abort(self) -> None:
        """Break the connection on both sides. From any thread; the descriptor stays valid until ``close``."""

    def close(self) -> None:
        """Release the connection and its descriptor."""


class TcpTransport:
    """Implements ``Transport`` over a connected stream socket, which it owns from now on."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._fd = sock.fileno()
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """See ``Transport``."""
        return self._fd

    def send(self, buffers: Sequence[bytes | memoryview], /) -> int:
        """See ``Transport``."""
        return os.writev(self._fd, buffers)

    def receive(self, buffers: Sequence[memoryview], /) -> int:
        """See ``Transport``."""
        return os.readv(self._fd, buffers)

    def unacknowledged_seconds(self) -> float:
        """See ``Transport``.

        The kernel's ``TCP_USER_TIMEOUT`` would also end a connection whose peer confirms everything and reads nothing
        for a while, as a peer that is still computing does.
        """
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            probes, unacknowledged, last_ms = _INFO.unpack(info)
        except (OSError, struct.error):  # closed, or no TCP socket
            return 0.0
        return last_ms / 1000 if unacknowledged or probes >= _LOST_PROBES else 0.0

    def traffic(self) -> Traffic:
        """See ``Transport``."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TRAFFIC.size)
            num_bytes, busy, without_room = _TRAFFIC.unpack(info)
        except (OSError, struct.error):  # no TCP socket, or a kernel that does not say
            return Traffic()
        return Traffic(num_bytes, busy - without_room)

    def write_eof(self) -> None:
        """See ``Transport``."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """See ``Transport``."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See ``Transport``."""
        self._fd = -1  # a number that another connection may get next
        self._socket.close()
