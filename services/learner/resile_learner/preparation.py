"""What a host prepares before a job's workers start there: environments and data, in folders that processes share."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from resile_shared.errors import ResileError

OnLine = Callable[[str], None]
LOCK_SECONDS = 0.2


class PreparationFailed(ResileError):
    """A worker cannot start here."""

    def __init__(self, reason: str, *, is_hosts_fault: bool = False) -> None:
        self.is_hosts_fault = is_hosts_fault
        """Whether another host may succeed."""
        super().__init__(reason)


@asynccontextmanager
async def locked(folder: Path, kind: int) -> AsyncIterator[int]:
    """Hold the lock of a folder; waits for processes that hold it otherwise."""
    lock = open_lock(folder)
    try:
        while True:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_SECONDS)
        yield lock
    finally:
        os.close(lock)


def open_lock(folder: Path) -> int:
    """Return a descriptor of the file beside ``folder`` that is locked, with flock, by who uses or changes it."""
    return os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def remove_unused(folder: Path, remove: Callable[[], None]) -> bool:
    """Call ``remove`` unless somebody uses the folder; return whether it was called."""
    lock = open_lock(folder)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove()
            return True
        return False
    finally:
        os.close(lock)
