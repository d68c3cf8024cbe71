"""The folder in which a host keeps datasets, shared by processes: what is there, who uses it, and what fits into it.

The lock beside the folder of a dataset is held by all that use or fetch it. The lock of the cache is held while a fetch
makes room: it reserves its bytes in its folder, so that fetches at the same time fit together.
"""

import asyncio
import fcntl
import os
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from resile_shared.folders import remove_tree
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.message import Count, Message

from ..preparation import LOCK_SECONDS, PreparationFailed, lock_folder, remove_lock, remove_unused

SPARE_BYTES = 64 << 20
"""Bytes that a fetch leaves free on the disk."""
_COMPLETE = "complete"
_RESERVED = "reserved"


class DataFailed(PreparationFailed):
    """The data of a job cannot be provided here."""


@dataclass(frozen=True)
class CachedDataset:
    """A dataset on this host. It is not removed before ``lock``, a descriptor, is closed."""

    path: Path
    sha256: str
    """Digest of the names and contents of all files."""
    lock: int


class Complete(Message):
    """The record of a dataset in the cache, which is written once the dataset is complete."""

    sha256: str
    num_bytes: Count
    file: str | None

    @classmethod
    def read(cls, folder: Path) -> "Complete | None":
        """Read the record in a folder; None if there is none, or it is damaged."""
        try:
            return cls.model_validate_json((folder / _COMPLETE).read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def write(self, folder: Path) -> None:
        """Write the record so that it, and the names of all files, survive a loss of power."""
        for name, _, _ in os.walk(folder / "data", topdown=False):
            _sync_folder(name)
        draft = folder / "draft"
        with draft.open("wb") as file:
            file.write(self.model_dump_json().encode())
            file.flush()
            os.fsync(file.fileno())
        draft.rename(folder / _COMPLETE)
        _sync_folder(folder)


class DatasetCache:
    """The cache below ``folder``, of at most ``max_bytes``."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def make_room(self, dataset: Dataset, own: Path, num_bytes: int) -> None:
        """Reserve ``num_bytes``, removing what was used longest ago if that is enough. Raises DataFailed."""
        if num_bytes > self._max_bytes:
            raise DataFailed(
                f"dataset {dataset.name} has {amount(num_bytes)}, and the cache of this host at most "
                f"{amount(self._max_bytes)}: start the host with a larger --data-cache, or use --mount",
                is_hosts_fault=True,
            )
        with ExitStack() as locks:
            locks.callback(os.close, self._lock())
            remove(own)  # of a fetch that was interrupted
            sizes, reserved, arriving = self._contents(own)
            full_by = sum(sizes.values()) + reserved + num_bytes - self._max_bytes
            short_of = arriving + num_bytes + SPARE_BYTES - self._num_free()
            unused = []
            for folder, size in sizes.items():
                if max(full_by, short_of) <= 0:
                    break
                with suppress(BlockingIOError):
                    locks.callback(os.close, lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB))
                    unused.append(folder)
                    full_by, short_of = full_by - size, short_of - size
            if full_by > 0:
                raise no_space(dataset, own, num_bytes, "the cache of this host is full of data that jobs use")
            if short_of > 0:
                raise no_space(dataset, own, num_bytes, f"{amount(self._num_free())} are free on this host's disk")
            for folder in unused:
                remove(folder)
                remove_lock(folder)
            own.mkdir(mode=0o700)
            (own / _RESERVED).write_text(str(num_bytes))

    def _contents(self, own: Path) -> tuple[dict[Path, int], int, int]:
        """Return the sizes of datasets, least recently used first; the bytes reserved by fetches, and those to come.

        Removes what killed fetches left. To be called with the cache locked.
        """
        used: dict[Path, tuple[float, int]] = {}
        reserved = arriving = 0
        for folder in self.folder.iterdir():
            if folder == own or not folder.is_dir():
                continue
            if complete := Complete.read(folder):
                used[folder] = ((folder / _COMPLETE).stat().st_mtime, complete.num_bytes)
            elif not remove_unused(folder, partial(remove, folder)):
                num_bytes = _reserved(folder)
                reserved += num_bytes
                arriving += max(num_bytes - _num_bytes_below(folder / "data"), 0)
        return {folder: used[folder][1] for folder in sorted(used, key=used.__getitem__)}, reserved, arriving

    def share(self, lock: int) -> None:
        """Let others use what was fetched. It has no lock for a moment, so the cache is locked: no fetch makes room."""
        cache = self._lock()
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
        finally:
            os.close(cache)

    def _lock(self) -> int:
        """Lock the cache, until the descriptor is closed. Blocks while another one makes room."""
        return lock_folder(self.folder / "cache", fcntl.LOCK_EX)

    def _num_free(self) -> int:
        return shutil.disk_usage(self.folder).free


async def use(folder: Path) -> CachedDataset | None:
    """Hold the dataset in a folder, which is then the most recently used; None if it is not there, or not yet."""
    while Complete.read(folder) is not None:
        try:
            lock = lock_folder(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # it was fetched just now, or is being removed
            await asyncio.sleep(LOCK_SECONDS)
            continue
        if complete := Complete.read(folder):
            os.utime(folder / _COMPLETE)
            return cached(folder, complete, lock)
        os.close(lock)
    return None


def cached(folder: Path, complete: Complete, lock: int) -> CachedDataset:
    """Return what is complete in a folder that is locked."""
    path = folder / "data"
    return CachedDataset(path / complete.file if complete.file else path, complete.sha256, lock)


def remove(folder: Path) -> None:
    """Remove a dataset, even if it is incomplete. Its folder must be locked."""
    (folder / _COMPLETE).unlink(missing_ok=True)
    remove_tree(folder)


def _sync_folder(folder: str | Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reserved(folder: Path) -> int:
    try:
        return int((folder / _RESERVED).read_bytes())
    except (FileNotFoundError, ValueError):  # it is about to be reserved
        return 0


def _num_bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def failed(dataset: Dataset, reason: str) -> DataFailed:
    """Return the error of a host that cannot fetch a dataset."""
    return DataFailed(f"dataset {dataset.name} cannot be fetched: {reason}", is_hosts_fault=True)


def no_space(dataset: Dataset, folder: Path, num_bytes: int, reason: str) -> DataFailed:
    """Return the error of a host without space for a dataset."""
    return failed(dataset, f"it has {amount(num_bytes)}, and {reason}: free some space for {folder.parent}")


def amount(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
