"""What carries the bytes of a link: today a TCP connection."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol


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

    def write_eof(self) -> None:
        """Let the peer see the end of the stream behind what was sent; receiving goes on."""

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
