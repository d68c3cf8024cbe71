"""The datasets of a host: each is fetched once into its cache, whole or not at all, for all jobs that wait for it."""

import asyncio
import errno
import fcntl
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from resile_shared.errors import ResileError
from resile_shared.messages.datasets import Dataset

from ..preparation import LOCK_SECONDS, OnLine, lock_folder
from ..threads import in_thread
from .cache import (
    CachedDataset,
    Complete,
    DataFailed,
    DatasetCache,
    amount,
    cached,
    failed,
    no_space,
    remove,
    use,
)
from .download import Cancelled, Download

if TYPE_CHECKING:
    from resile_shared.storage.dataset_sources import Listing

MAX_BYTES = 200 * 10**9
PROGRESS_SECONDS = 5.0
RETRY_SECONDS = 10.0
CLOSE_SECONDS = 5.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(eq=False)
class _Fetch:
    """The fetch of a dataset into the cache, for all that wait for it."""

    dataset: Dataset
    folder: Path
    waiting: defaultdict[str, list[OnLine]] = field(default_factory=lambda: defaultdict(list))
    """The callbacks that get the progress, by job."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set once nobody waits for the fetch."""
    task: "asyncio.Task[CachedDataset]" = field(init=False)

    def on_line(self, text: str) -> None:
        """Report progress to all waiting jobs."""
        for first, *_ in list(self.waiting.values()):
            first(f"dataset {self.dataset.name}: {text}")

    @contextmanager
    def joined(self, job: str, on_line: OnLine) -> Iterator[None]:
        """Wait for it within the block; it is cancelled when the last one has left."""
        self.waiting[job].append(on_line)
        try:
            yield
        finally:
            self.waiting[job].remove(on_line)
            if not self.waiting[job]:
                del self.waiting[job]
            if not self.waiting:
                self.cancelled.set()
                self.task.add_done_callback(_release)

    async def pause(self, seconds: float) -> None:
        """Wait for ``seconds``. Raises Cancelled once nobody waits for the fetch."""
        if await in_thread(self.cancelled.wait, seconds):
            raise Cancelled


class HostDatasets:
    """The cache below ``folder``, of at most ``max_bytes``; ``storage`` is the URL of the pool's storage, or empty."""

    def __init__(self, folder: Path, *, storage: str, max_bytes: int = MAX_BYTES) -> None:
        self._cache = DatasetCache(folder, max_bytes=max_bytes)
        self._storage = storage
        self._fetches: dict[Path, _Fetch] = {}
        self._is_closed = False

    async def get(
        self, dataset: Dataset, on_line: OnLine, *, job: str = "", sha256: str | None = None
    ) -> CachedDataset:
        """Return the dataset, fetched first if needed. Raises DataFailed.

        ``on_line`` gets the progress, unless another call for the same ``job`` gets it. The source is compared with
        what was registered, unless the data is here and has ``sha256``, or is here and the source cannot be reached.
        While the data is not here and its source, other than a folder of this host, cannot be reached, this waits.
        """
        key = hashlib.sha256(f"{dataset.uri}\n{dataset.version}".encode()).hexdigest()[:32]
        folder = self._cache.folder / key
        try:
            self._cache.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if sha256 is not None and (found := await use(folder)):
                if found.sha256 == sha256:
                    return found
                os.close(found.lock)
            while (ending := self._fetches.get(folder)) and ending.cancelled.is_set():
                await asyncio.wait({ending.task})
            fetch = self._fetches.get(folder) or self._start(dataset, folder)
            with fetch.joined(job, on_line):
                found = await asyncio.shield(fetch.task)  # the caller may be cancelled; others still need it
                return CachedDataset(found.path, found.sha256, lock_folder(folder, fcntl.LOCK_SH))
        except Cancelled:
            raise failed(dataset, "it is not needed any more") from None
        except OSError as error:
            raise failed(dataset, f"{error.filename or self._cache.folder}: {error.strerror or repr(error)}") from error

    @property
    def is_local(self) -> bool:
        """Whether there is no pool: datasets are registered in the home folder of Resile."""
        return not self._storage

    async def close(self) -> None:
        """End the fetches that run; those that are blocked are left to end with the process."""
        self._is_closed = True
        for fetch in self._fetches.values():
            fetch.cancelled.set()
        if self._fetches:
            await asyncio.wait([fetch.task for fetch in self._fetches.values()], timeout=CLOSE_SECONDS)

    def _start(self, dataset: Dataset, folder: Path) -> _Fetch:
        if self._is_closed:
            raise Cancelled
        fetch = self._fetches[folder] = _Fetch(dataset, folder)
        fetch.task = asyncio.create_task(self._provide(fetch))
        fetch.task.add_done_callback(lambda _: self._fetches.pop(folder))
        return fetch

    async def _provide(self, fetch: _Fetch) -> CachedDataset:
        """Bring the dataset into the cache, unless it is there. Raises DataFailed, OSError, Cancelled."""
        dataset = fetch.dataset
        is_local = dataset.uri.startswith("file://")
        while True:
            try:
                listing = await in_thread(self._list, dataset, fetch.folder)
                if isinstance(listing, str):
                    fetch.on_line(f"using what this host fetched before, since {listing}")
                if found := await use(fetch.folder):
                    return found
                if not isinstance(listing, str) and (found := await self._fetch(fetch, listing)):
                    return found
            except DataFailed:
                raise
            except ResileError as error:  # of the source
                if is_local or not _is_transient(error):
                    raise _source_failed(dataset, error, is_local=is_local) from error
                fetch.on_line(f"waiting for the source: {error}")
                await fetch.pause(RETRY_SECONDS)

    def _list(self, dataset: Dataset, folder: Path) -> "Listing | str":
        """List the source; or return why it cannot be reached, if it is not needed."""
        from resile_shared.storage.dataset_sources import (  # loads the clients of all clouds
            check_unchanged,
            list_source,
        )

        try:
            listing = list_source(dataset.uri, pool=self._storage)
        except ResileError as error:
            if _is_transient(error) and Complete.read(folder) is not None:
                return str(error)
            raise
        check_unchanged(dataset, listing, is_local=self.is_local)
        return listing

    async def _fetch(self, fetch: _Fetch, listing: "Listing") -> CachedDataset | None:
        """Fetch the data; None if another process has done so meanwhile."""
        lock = await _lock_incomplete(fetch)
        if lock is None:
            return None
        try:
            await in_thread(self._cache.make_room, fetch.dataset, fetch.folder, listing.num_bytes)
            fetch.on_line(f"fetching {_described(listing)} from {fetch.dataset.uri}")
            complete = await self._download(fetch, listing)
            await in_thread(complete.write, fetch.folder)
            await in_thread(self._cache.share, lock)
            fetch.on_line(f"fetched, sha256 {complete.sha256}")
        except BaseException:
            await in_thread(remove, fetch.folder)
            os.close(lock)
            raise
        return cached(fetch.folder, complete, lock)

    async def _download(self, fetch: _Fetch, listing: "Listing") -> Complete:
        download = Download(listing, fetch.folder / "data", fetch.cancelled)
        running = asyncio.ensure_future(in_thread(download.run))
        while not (await asyncio.wait({running}, timeout=PROGRESS_SECONDS))[0]:
            fetch.on_line(f"{amount(download.num_bytes)} of {amount(listing.num_bytes)} fetched")
        try:
            sha256 = running.result()
        except OSError as error:
            if error.errno in _NO_SPACE:
                reason = "no space is left on this host's disk"
                raise no_space(fetch.dataset, fetch.folder, listing.num_bytes, reason) from error
            raise
        await in_thread(self._list, fetch.dataset, fetch.folder)  # it has not changed meanwhile
        return Complete(sha256=sha256, num_bytes=listing.num_bytes, file=listing.file)


async def _lock_incomplete(fetch: _Fetch) -> int | None:
    """Lock a folder for its fetch, and return the descriptor; None once another process has fetched it."""
    while True:
        with suppress(BlockingIOError):
            lock = lock_folder(fetch.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if Complete.read(fetch.folder) is None:
                return lock
            os.close(lock)
        if Complete.read(fetch.folder) is not None:  # it may be locked for as long as it is used
            return None
        await fetch.pause(LOCK_SECONDS)


def _release(task: "asyncio.Task[CachedDataset]") -> None:
    """Close what a fetch holds, even if nobody waits for it."""
    if not task.cancelled() and task.exception() is None:
        os.close(task.result().lock)


def _is_transient(error: ResileError) -> bool:
    """Whether the storage may work later."""
    return getattr(error, "transient", False)


def _source_failed(dataset: Dataset, error: ResileError, *, is_local: bool) -> DataFailed:
    from resile_shared.storage.dataset_sources import SourceChanged  # loads the clients of all clouds

    if isinstance(error, SourceChanged):
        return DataFailed(str(error))
    return DataFailed(f"dataset {dataset.name}: {error}", is_hosts_fault=is_local)


def _described(listing: "Listing") -> str:
    count = len(listing.files)
    return f"{amount(listing.num_bytes)} in {count} file{'s' if count != 1 else ''}"
