"""Buffers what a worker prints until it is sent to the bus, in batches."""

from collections import deque

from resile_shared.messages.logs import LogLine

BATCH_LINES = 200
BATCH_BYTES = 512 * 1024  # control characters may take six times as much on the bus
MAX_WAITING_LINES = 5000
MAX_WAITING_BYTES = 2 * 1024 * 1024


class LogBuffer:
    """The newest lines of one worker that are not sent yet. The oldest are dropped beyond the limits, and counted."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque()
        self._bytes = 0
        self._dropped = 0

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._lines)

    def add(self, line: LogLine) -> None:
        """Add a line."""
        self._lines.append(line)
        self._bytes += _size(line)
        while len(self._lines) > MAX_WAITING_LINES or self._bytes > MAX_WAITING_BYTES:
            self._bytes -= _size(self._lines.popleft())
            self._dropped += 1

    def take(self) -> tuple[tuple[LogLine, ...], int]:
        """Remove the next batch; return its lines, and how many were dropped before them."""
        batch: list[LogLine] = []
        room = BATCH_BYTES
        while self._lines and len(batch) < BATCH_LINES and (room >= _size(self._lines[0]) or not batch):
            batch.append(self._lines.popleft())
            room -= _size(batch[-1])
        self._bytes -= sum(map(_size, batch))
        dropped, self._dropped = self._dropped, 0
        return tuple(batch), dropped

    def put_back(self, lines: tuple[LogLine, ...], dropped: int) -> None:
        """Put back a batch that could not be sent, as far as there is room."""
        newer, self._lines = self._lines, deque()
        self._bytes, self._dropped = 0, self._dropped + dropped
        for line in (*lines, *newer):
            self.add(line)


def _size(line: LogLine) -> int:
    return len(line.text) + 64
