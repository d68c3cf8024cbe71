"""The cache of datasets on a host: each is fetched once, whole or not at all, and kept while there is room.

A dataset is in a folder named by the digest of its source and version. Several processes may share the cache: a lock
beside each folder keeps two from fetching the same, and one from removing what another uses.
"""

import asyncio
import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from resile_shared.errors import ResileError
from resile_shared.messages.datasets import Dataset

from .preparation import LOCK_SECONDS, OnLine, PreparationFailed, open_lock, remove_unused

if TYPE_CHECKING:
    from resile_shared.dataset_sources import Listing

MAX_BYTES = 200 * 10**9
SPARE_BYTES = 64 << 20
"""What a fetch leaves free on the disk."""
PROGRESS_SECONDS = 5.0
NUM_THREADS = 8
_PIECE_BYTES = 8 << 20
_COMPLETE = "complete"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class DataFailed(PreparationFailed):
    """The data of a job cannot be had here."""


class _Cancelled(Exception):
    """Nobody waits for the fetch any more."""


@dataclass(frozen=True)
class CachedDataset:
    """A dataset on this host. It is not removed before ``lock``, a descriptor, is closed."""

    path: Path
    sha256: str
    """Of the names and contents of all files."""
    lock: int


@dataclass(frozen=True)
class _Complete:
    """What is noted of a dataset in the cache once it is whole."""

    sha256: str
    num_bytes: int
    file: str | None

    @classmethod
    def read(cls, folder: Path) -> "_Complete | None":
        try:
            return cls(**orjson.loads((folder / _COMPLETE).read_bytes()))
        except FileNotFoundError:
            return None


class Datasets:
    """The cache below ``folder``, of at most ``max_bytes``; ``storage`` is the URL of the pool's, empty without one."""

    def __init__(self, folder: Path, *, storage: str, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._storage = storage
        self._max_bytes = max_bytes
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._is_closed = threading.Event()

    async def get(self, dataset: Dataset, on_line: OnLine) -> CachedDataset:
        """Return the dataset, fetched first if needed; ``on_line`` gets the progress. Raises DataFailed.

        The source is compared with what was registered, unless it cannot be reached and the data is here.
        """
        key = hashlib.sha256(f"{dataset.uri}\n{dataset.version}".encode()).hexdigest()[:32]
        folder = self._folder / key
        try:
            while True:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                listing = await asyncio.to_thread(self._list, dataset, folder)
                if isinstance(listing, str):
                    on_line(f"dataset {dataset.name}: using what this host fetched before, since {listing}")
                if found := _use(folder):
                    return found
                if isinstance(listing, str):  # removed just now
                    continue
                if key not in self._fetching:
                    fetching = asyncio.create_task(self._fetch(dataset, listing, folder, on_line))
                    self._fetching[key] = fetching
                    fetching.add_done_callback(lambda _: self._fetching.pop(key))
                await asyncio.shield(self._fetching[key])  # the caller may be cancelled; others still need it
        except OSError as error:
            raise _failed(dataset, error.strerror or repr(error)) from error

    async def close(self) -> None:
        """End the fetches that run."""
        self._is_closed.set()
        await asyncio.gather(*self._fetching.values(), return_exceptions=True)

    def _list(self, dataset: Dataset, folder: Path) -> "Listing | str":
        """List the source; or return why it cannot be reached, if it is not needed. Raises DataFailed."""
        from resile_shared.dataset_sources import check_unchanged, list_source  # loads the clients of all clouds

        is_here = _Complete.read(folder) is not None
        try:
            listing = list_source(dataset.uri, pool=self._storage)
            check_unchanged(dataset, listing)
        except ResileError as error:
            if _is_transient(error) and is_here:
                return str(error)
            raise DataFailed(str(error), is_hosts_fault=_is_transient(error)) from error
        return listing

    async def _fetch(self, dataset: Dataset, listing: "Listing", folder: Path, on_line: OnLine) -> None:
        lock = await _lock_incomplete(folder)
        if lock is None:
            return
        try:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # a fetch that was interrupted
            await asyncio.to_thread(self._make_room, dataset, folder)
            on_line(f"dataset {dataset.name}: fetching {_described(listing)} from {dataset.uri}")
            complete = await self._download(dataset, listing, folder, on_line)
            await asyncio.to_thread(_note_complete, folder, complete)
            on_line(f"dataset {dataset.name}: fetched, sha256 {complete.sha256}")
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        finally:
            os.close(lock)

    async def _download(self, dataset: Dataset, listing: "Listing", folder: Path, on_line: OnLine) -> _Complete:
        fetch = _Fetch(listing, folder / "data", is_cancelled=self._is_closed.is_set)
        running = asyncio.create_task(asyncio.to_thread(fetch.run))
        while not (await asyncio.wait({running}, timeout=PROGRESS_SECONDS))[0]:
            on_line(f"dataset {dataset.name}: {_amount(fetch.num_bytes)} of {_amount(listing.num_bytes)} fetched")
        try:
            sha256 = running.result()
        except _Cancelled:
            raise _failed(dataset, "it is not needed any more") from None
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise _no_space(dataset, folder, "no space is left on this host's disk") from error
            raise
        except ResileError as error:  # of the storage
            raise DataFailed(f"dataset {dataset.name}: {error}", is_hosts_fault=_is_transient(error)) from error
        await asyncio.to_thread(self._list, dataset, folder)  # it has not changed meanwhile
        return _Complete(sha256, listing.num_bytes, listing.file)

    def _make_room(self, dataset: Dataset, folder: Path) -> None:
        """Remove what was used longest ago until the dataset fits into the cache and on the disk. Raises DataFailed."""
        needed = dataset.num_bytes
        if needed > self._max_bytes:
            raise DataFailed(
                f"dataset {dataset.name} has {_amount(needed)}, and the cache of a host at most "
                f"{_amount(self._max_bytes)}: start the host with a larger --data-cache, or use --mount"
            )
        marks = sorted(self._folder.glob(f"*/{_COMPLETE}"), key=lambda mark: mark.stat().st_mtime)
        sizes = {mark.parent: complete.num_bytes for mark in marks if (complete := _Complete.read(mark.parent))}
        for oldest in list(sizes):
            if sum(sizes.values()) + needed <= self._max_bytes and self._num_free() >= needed + SPARE_BYTES:
                return
            if remove_unused(oldest, partial(_remove, oldest)):
                del sizes[oldest]
        if sum(sizes.values()) + needed > self._max_bytes:
            raise _no_space(dataset, folder, "the cache of this host is full of data that jobs use")
        if self._num_free() < needed + SPARE_BYTES:
            raise _no_space(dataset, folder, f"{_amount(self._num_free())} are free on this host's disk")

    def _num_free(self) -> int:
        return shutil.disk_usage(self._folder).free


class _Fetch:
    """Fetches the files of a source into a folder; ``num_bytes`` have arrived. Blocks, in threads of its own."""

    def __init__(self, listing: "Listing", folder: Path, *, is_cancelled: Callable[[], bool]) -> None:
        self.num_bytes = 0
        self._listing = listing
        self._folder = folder
        self._is_cancelled = is_cancelled
        self._counting = threading.Lock()

    def run(self) -> str:
        """Return the digest of all files. Raises StorageError, OSError."""
        keys = sorted(self._listing.files)
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            futures = [threads.submit(self._fetch_file, key) for key in keys]
            try:
                digests = [future.result() for future in futures]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        return _digest_of(dict(zip(keys, digests, strict=True)))

    def _fetch_file(self, key: str) -> str:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = self._listing.files[key].num_bytes
        sha = hashlib.sha256()
        with path.open("xb") as file:
            for start in range(0, num_bytes, _PIECE_BYTES):
                if self._is_cancelled():
                    raise _Cancelled
                piece = self._listing.storage.read_range(key, start, min(start + _PIECE_BYTES, num_bytes))
                sha.update(piece)
                file.write(piece)
                with self._counting:
                    self.num_bytes += len(piece)
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o444)
        return sha.hexdigest()


async def _lock_incomplete(folder: Path) -> int | None:
    """Lock a folder for its fetch, and return the descriptor; None once another process has fetched it."""
    lock = open_lock(folder)
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _Complete.read(folder) is None:
                    held, lock = lock, -1
                    return held
            if _Complete.read(folder) is not None:  # it may be locked for as long as it is used
                return None
            await asyncio.sleep(LOCK_SECONDS)
    finally:
        if lock >= 0:
            os.close(lock)


def _use(folder: Path) -> CachedDataset | None:
    """Hold the dataset in a folder, which is then the most recently used; None if it is not there, or not yet."""
    lock = open_lock(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        complete = _Complete.read(folder)
        if complete is not None:
            os.utime(folder / _COMPLETE)
            path = folder / "data"
            held, lock = lock, -1
            return CachedDataset(path / complete.file if complete.file else path, complete.sha256, held)
    except BlockingIOError:
        pass
    finally:
        if lock >= 0:
            os.close(lock)
    return None


def _note_complete(folder: Path, complete: _Complete) -> None:
    draft = folder / "draft"
    draft.write_bytes(orjson.dumps(vars(complete)))
    draft.rename(folder / _COMPLETE)


def _remove(folder: Path) -> None:
    (folder / _COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _digest_of(files: Mapping[str, str]) -> str:
    """The sha256, in hex, of the names of files and the digests of their contents."""
    return hashlib.sha256("".join(f"{key}\0{digest}\n" for key, digest in sorted(files.items())).encode()).hexdigest()


def _is_transient(error: ResileError) -> bool:
    """Whether the storage may work later, or on another host."""
    return getattr(error, "transient", False)


def _failed(dataset: Dataset, reason: str) -> DataFailed:
    return DataFailed(f"dataset {dataset.name} cannot be fetched: {reason}", is_hosts_fault=True)


def _no_space(dataset: Dataset, folder: Path, reason: str) -> DataFailed:
    return _failed(dataset, f"it has {_amount(dataset.num_bytes)}, and {reason}: free some space for {folder.parent}")


def _described(listing: "Listing") -> str:
    count = len(listing.files)
    return f"{_amount(listing.num_bytes)} in {count} file{'s' if count != 1 else ''}"


def _amount(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
