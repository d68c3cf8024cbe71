"""The file that keeps what one worker prints."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path

MAX_LOG_BYTES = 64 * 1024 * 1024


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
def worker_log(folder: Path, worker: int) -> Iterator[WorkerLog]:
    """Open the log of ``worker`` in ``folder``. Raises OSError."""
    with (folder / f"worker-{worker}.log").open("ab", buffering=0) as file:
        yield WorkerLog(file)
