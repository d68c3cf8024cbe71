"""Reads what a worker prints, line by line, and keeps it in a file."""

import asyncio
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path

MAX_LINE_BYTES = 64 * 1024
MAX_LOG_BYTES = 64 * 1024 * 1024
MAX_ENDED_LOGS = 100
MAX_ENDED_BYTES = 256 * 1024 * 1024
_NAME = re.compile(r"worker-([0-9]+)\.log")


class Lines(asyncio.Protocol):
    """Reads one pipe and delivers its lines: decoded, without the newline, cut at `MAX_LINE_BYTES`.

    If a line is redrawn with carriage returns, as progress bars are, only the last drawing is delivered.
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


class WorkerLog:
    """Keeps the lines of one worker, up to `MAX_LOG_BYTES`."""

    def __init__(self, file: RawIOBase) -> None:
        self._file = file
        self._room = MAX_LOG_BYTES

    def write(self, line: str) -> None:
        """Append a line; once the log is full, note that there and drop the rest.

        Raises OSError when the file cannot be written. Later lines are then dropped too.
        """
        content = line.encode(errors="replace") + b"\n"
        if 0 < self._room < len(content):
            content = b"[this log is full: what follows is not kept]\n"
            self._room = len(content)
        if self._room <= 0:
            return
        try:
            self._file.write(content)
            self._room -= len(content)
        except OSError:
            self._room = 0
            raise


@contextmanager
def worker_log(folder: Path, worker: int, *, running: Collection[int] = ()) -> Iterator[WorkerLog]:
    """Open the log of ``worker`` in ``folder``, where the logs of ``running`` workers are. Raises OSError.

    Of the workers that have ended, the newest logs are kept: `MAX_ENDED_LOGS` of up to `MAX_ENDED_BYTES` in total.
    """
    _remove_old_logs(folder, running)
    with (folder / f"worker-{worker}.log").open("ab", buffering=0) as file:
        yield WorkerLog(file)


def _remove_old_logs(folder: Path, running: Collection[int]) -> None:
    logs = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    num_bytes = 0
    for position, worker in enumerate(sorted(logs.keys() - set(running), reverse=True)):
        num_bytes += logs[worker].lstat().st_size
        if position >= MAX_ENDED_LOGS or num_bytes > MAX_ENDED_BYTES:
            logs[worker].unlink()
