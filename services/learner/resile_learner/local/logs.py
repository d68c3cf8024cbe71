"""What the workers of a run printed, kept in one file each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 64 * 1024 * 1024


class WorkerLog:
    """Keeps the lines of one worker, up to `MAX_LOG_BYTES`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._room = MAX_LOG_BYTES

    def keep(self, line: str) -> None:
        """Append a line; once the log is full, say so and drop the rest."""
        content = line.encode(errors="replace") + b"\n"
        if 0 < self._room < len(content):
            content = b"[this log is full: what follows is not kept]\n"
            self._room = len(content)
        if self._room > 0:
            self._file.write(content)
            self._file.flush()
            self._room -= len(content)


@contextmanager
def worker_log(folder: Path, worker: int) -> Iterator[WorkerLog]:
    """Open the log of ``worker`` in ``folder``."""
    with (folder / f"worker-{worker}.log").open("ab") as file:
        yield WorkerLog(file)
