"""Removes all that is stored of jobs, one after the other: objects, messages in streams, and the records last.

What fails is tried again, also by the next scheduler: the record, which says that the job is deleted, goes last. While
the bus refuses to store that record, nothing is removed: the next scheduler would find a job that goes on.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable

from resile_shared.bus.client import Bus
from resile_shared.bus.connection import StoreFailed
from resile_shared.bus.subjects import JOB_STREAMS
from resile_shared.storage.objects import MissingObjectError, ObjectStorage, StorageError

from .core.events import RemoveJob
from .executor import Executor
from .lease import Lease

logger = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
MAX_LOOKS = 5
"""So often a storage is looked at that does not show what is known to be stored: its lists may be old, or what is
mounted there may be something else. Then somebody else has removed it."""
_MANIFEST = re.compile(r"/checkpoints/lineage-(\d+)/(\d+)-g\d+/manifest\.json$")


class Remover:
    """Carries out `RemoveJob`. Without ``storage`` objects stay where they are."""

    def __init__(
        self, bus: Bus, lease: Lease, executor: Executor, storage: str | None, *, on_removed: Callable[[str], None]
    ) -> None:
        self._bus = bus
        self._lease = lease
        self._executor = executor
        self._url = storage
        self._storage: ObjectStorage | None = None
        self._on_removed = on_removed
        self._waiting: asyncio.Queue[RemoveJob] = asyncio.Queue()
        self._jobs: set[str] = set()
        """The jobs that wait, are being removed, or will be tried again."""
        self._looks: dict[str, int] = {}
        """How often the storage of each of them did not show what is stored."""

    def put(self, command: RemoveJob) -> None:
        """Add a job to the queue, unless its removal is under way.

        A core that starts over requests it again, but when it ends a new job may have the same package.
        """
        if command.job not in self._jobs:
            self._jobs.add(command.job)
            self._waiting.put_nowait(command)

    async def run(self) -> None:
        """Remove jobs forever. Raises FencedError and LeadershipLost."""
        while True:
            command = await self._waiting.get()
            if self._executor.is_refused(command.job):
                self._retry(command, "the bus refuses to store that it is deleted")
                continue
            try:
                await self._remove(command)
            except (StorageError, StoreFailed) as error:
                self._retry(command, str(error))
            else:
                logger.info("removed job=%s", command.job)
                self._jobs.remove(command.job)
                self._looks.pop(command.job, None)
                self._on_removed(command.job)

    def _retry(self, command: RemoveJob, reason: str) -> None:
        logger.warning("job not removed yet, retrying job=%s: %s", command.job, reason)
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._waiting.put_nowait, command)

    async def _remove(self, command: RemoveJob) -> None:
        if self._url is not None:
            await self._remove_objects(self._url, command)
        for stream, subject_of in JOB_STREAMS:
            await self._bus.purge(stream, subject_of(command.job))
        await self._executor.remove(command.job)

    async def _remove_objects(self, url: str, command: RemoveJob) -> None:
        """Remove the package last: its name comes from its content, so a job of the next leader may have the same."""
        if self._storage is None:
            self._storage = await asyncio.to_thread(ObjectStorage, url)
        storage = self._storage
        folder = f"jobs/{command.job}"
        await self._check_shown(storage, command)
        await asyncio.to_thread(storage.delete_folder, f"{folder}/checkpoints/" if command.keeps_results else folder)
        if command.package and not command.is_package_used:
            await self._lease.confirm()
            await asyncio.to_thread(storage.delete, [command.package])

    async def _check_shown(self, storage: ObjectStorage, command: RemoveJob) -> None:
        """Raise StorageError if the storage does not show what is known to be stored there."""
        looks = self._looks.get(command.job, 0)
        if looks >= MAX_LOOKS:
            return
        missing = await asyncio.to_thread(_missing, storage, command)
        if not missing:
            self._looks[command.job] = MAX_LOOKS  # from now on there is less
            return
        self._looks[command.job] = looks + 1
        advice = "is what is mounted there the pool's storage?"
        raise StorageError(f"list jobs/{command.job}", f"{missing} is not there", advice)


def _missing(storage: ObjectStorage, command: RemoveJob) -> str:
    """Return what is known to be stored and is not shown: the package, or the newest checkpoint that was reported.

    The package is there as long as a job has it. It is the only evidence of a job with no checkpoint that was reported:
    parts, and a checkpoint that is not reported yet, are stored nevertheless.
    """
    try:
        if command.package:
            storage.size(command.package)
    except MissingObjectError:
        return f"its package {command.package}"
    if command.checkpoint is None:
        return ""
    stored = (command.checkpoint.lineage, command.checkpoint.iteration)
    shown = storage.sizes(f"jobs/{command.job}/checkpoints/")
    is_shown = any(checkpoint >= stored for checkpoint in _checkpoints(shown))
    return "" if is_shown else f"the checkpoint of iteration {command.checkpoint.iteration}"


def _checkpoints(keys: Iterable[str]) -> list[tuple[int, int]]:
    """Return the lineage and the iteration of each checkpoint that is whole."""
    found = filter(None, map(_MANIFEST.search, keys))
    return [(int(match[1]), int(match[2])) for match in found]
