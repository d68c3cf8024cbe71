"""Reads what a worker prints, line by line."""

import asyncio
from collections.abc import Callable

MAX_LINE_BYTES = 64 * 1024


class Lines(asyncio.Protocol):
    """Reads one pipe and delivers its lines: decoded, without the newline, cut at `MAX_LINE_BYTES`.

    Of a line that is redrawn with carriage returns, as progress bars do, only the last drawing is delivered.
    """

    def __init__(self, deliver: Callable[[str], None]) -> None:
        self._deliver = deliver
        self._rest = b""
        self._cutting = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Deliver the lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)
        self._rest = _last_drawing(self._rest)
        if len(self._rest) > MAX_LINE_BYTES:
            self._line(self._rest)
            self._rest = b""
            self._cutting = True

    def eof_received(self) -> None:
        """Deliver the last line if it had no newline."""
        if self._rest:
            self._line(self._rest)
        self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Resolve `closed`."""
        self.eof_received()
        if not self.closed.done():
            self.closed.set_result(None)

    def _line(self, line: bytes) -> None:
        if self._cutting:
            self._cutting = False
            return
        line = _last_drawing(line).rstrip(b"\r")
        text = line[:MAX_LINE_BYTES].decode(errors="replace")
        self._deliver(text if len(line) <= MAX_LINE_BYTES else f"{text} [... cut]")


def _last_drawing(line: bytes) -> bytes:
    """Return the part after the last carriage return that something follows."""
    return line[line.rfind(b"\r", 0, len(line.rstrip(b"\r"))) + 1 :]
