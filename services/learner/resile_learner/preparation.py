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
    """Hold the lock of a folder; waits for processes that hold a conflicting one."""
    while True:
        try:
            lock = lock_folder(folder, kind | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            await asyncio.sleep(LOCK_SECONDS)
    try:
        yield lock
    finally:
        os.close(lock)


def lock_folder(folder: Path, kind: int) -> int:
    """Lock a folder for its use or change, by flock of a file beside it, until the descriptor returned is closed.

    Waits, or with ``LOCK_NB`` in ``kind`` raises BlockingIOError, while others hold the lock.
    """
    file = _lock_file(folder)
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, kind)
            if _is_there(file, lock):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # the file was removed together with its folder before this lock was free


def remove_lock(folder: Path) -> None:
    """Remove the lock file of a folder that was removed. This process holds the lock, exclusively."""
    _lock_file(folder).unlink(missing_ok=True)


def remove_unused(folder: Path, remove: Callable[[], None]) -> bool:
    """Call ``remove`` unless somebody uses the folder; return whether it was called."""
    try:
        lock = lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        remove()
        if not folder.exists():
            remove_lock(folder)
    finally:
        os.close(lock)
    return True


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _is_there(file: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    return False
