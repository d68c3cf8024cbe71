"""What the workers of jobs leave on a host: uploaded as they write it, and removed once no worker is here.

The logs of the newest jobs stay. Nothing stays of a job that was deleted (its record says so, or is gone), and nothing
of it is uploaded any more.
"""

import asyncio
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from resile_shared.bus.buckets import Bucket
from resile_shared.errors import ResileError
from resile_shared.folders import remove_tree
from resile_shared.messages.jobs import JobRecord
from resile_shared.text import printable

from ..threads import in_thread
from .folder import AgentFolder

if TYPE_CHECKING:
    from resile_shared.storage.objects import ObjectStorage

OUTPUT_SECONDS = 5.0
DELETED_SECONDS = 300.0
"""Seconds between two checks whether the jobs that have only logs here were deleted."""
logger = logging.getLogger(__name__)

Version = tuple[int, int]
"""When a file, or only its metadata, was changed last (in nanoseconds), and its number of bytes."""


class Outputs:
    """Uploads the output folders of jobs to ``jobs/<job>/output`` of the storage, each file again when it changes."""

    def __init__(self, storage: str) -> None:
        self._url = storage
        self._storage: ObjectStorage | None = None
        self._jobs: defaultdict[str, _JobOutput] = defaultdict(_JobOutput)
        self._running: dict[str, asyncio.Task[bool]] = {}

    async def upload(self, job: str, folder: Path) -> bool:
        """Upload what has changed; return whether all of it is stored now. What failed is retried by the next call.

        When the caller is cancelled, the upload continues, and the next call waits for it, so that a large file is not
        uploaded several times at once.
        """
        while running := self._running.get(job):
            await asyncio.wait({running})
        uploading = self._running[job] = asyncio.create_task(self._try_upload(job, folder))
        uploading.add_done_callback(lambda _: self._running.pop(job))
        return await asyncio.shield(uploading)

    async def _try_upload(self, job: str, folder: Path) -> bool:
        try:
            failures = await in_thread(self._upload, job, folder)
        except (ResileError, OSError) as error:
            failures = [error]
        if failures:
            logger.warning("the output of job %s is not stored yet: %s", job, failures[0])
        return not failures

    def take_refused(self, job: str) -> list[str]:
        """Return, once, which files of ``job`` can never be stored, and why: one line for each."""
        lines = self._jobs[job].lines
        return [lines.pop(0) for _ in range(len(lines))]

    def forget(self, job: str) -> None:
        """Forget a job whose output folder is removed."""
        self._jobs.pop(job, None)

    def _upload(self, job: str, folder: Path) -> list[ResileError | OSError]:
        """Upload the files that have changed, except those that can never be stored; return what failed."""
        from resile_shared.storage.objects import NameRefused  # loads the clients of all clouds

        storage, output = self._open(), self._jobs[job]
        failures: list[ResileError | OSError] = []
        for path, version in _files(folder):
            name = path.relative_to(folder).as_posix()
            if output.settled.get(name) == version:
                continue
            try:
                os.close(os.open(path, os.O_RDONLY))
                storage.upload(f"jobs/{job}/output/{name}", path)
            except PermissionError:  # not of the storage
                self._refuse(job, name, "it cannot be read; give its owner the permission (chmod u+r)")
            except NameRefused as error:
                self._refuse(job, name, f"{error.reason}; {error.advice}")
            except (ResileError, OSError) as error:  # the other files can be stored all the same
                failures.append(error)
                continue
            output.settled[name] = version
        return failures

    def _refuse(self, job: str, name: str, reason: str) -> None:
        """Note, once, why a file is not stored."""
        output = self._jobs[job]
        if name in output.refused:
            return
        output.refused.add(name)
        line = f"the output file {printable(name)} is not stored: {reason}"
        logger.warning("job %s: %s", job, line)
        output.lines.append(line)

    def _open(self) -> "ObjectStorage":
        if self._storage is None:
            from resile_shared.storage.objects import ObjectStorage  # loads the clients of all clouds

            self._storage = ObjectStorage(self._url)
        return self._storage


class JobFiles:
    """The files of all jobs on one host.

    ``upload`` uploads the output of a job, and returns whether all of it is stored; ``needs`` says whether a job may
    have a worker here.
    """

    def __init__(
        self,
        folder: AgentFolder,
        outputs: Outputs,
        jobs: Bucket[JobRecord],
        *,
        upload: Callable[[str], Awaitable[bool]],
        needs: Callable[[str], bool],
    ) -> None:
        self._folder = folder
        self._outputs = outputs
        self._jobs = jobs
        self._upload = upload
        self._needs = needs

    async def upload(self) -> None:
        """Upload what workers write, until cancelled."""
        while True:
            await asyncio.sleep(OUTPUT_SECONDS)
            for job in filter(self._needs, self._folder.jobs_with_files()):
                await self._upload(job)

    async def upload_rest(self) -> None:
        """Upload what is not stored yet, of all jobs."""
        for job in self._folder.jobs_with_files():
            await self._upload(job)

    async def remove_unneeded(self) -> None:
        """Remove the code and output of jobs that no longer need this host, once they are stored, until cancelled."""
        while True:
            await asyncio.sleep(OUTPUT_SECONDS)
            for job in self._not_needed(self._folder.jobs_with_files()):
                if await self._is_deleted(job):
                    await self._remove_all(job)
                elif await self._upload(job) and not self._needs(job):
                    await self._remove_files(job)

    async def remove_deleted(self) -> None:
        """Remove the logs of jobs that were deleted, until cancelled."""
        while True:
            await asyncio.sleep(DELETED_SECONDS)
            for job in self._not_needed(self._folder.all_jobs()):
                if await self._is_deleted(job):
                    await self._remove_all(job)

    def _not_needed(self, jobs: list[str]) -> list[str]:
        return [job for job in jobs if not self._needs(job)]

    async def _is_deleted(self, job: str) -> bool:
        """Return whether ``job`` was deleted; waits while NATS is disconnected."""
        try:
            entry = await self._jobs.get(job)
        except ResileError:
            return False
        return entry is None or entry.value.is_deleted

    async def _remove_files(self, job: str) -> None:
        gone = [*self._folder.drop_files(job), *self._folder.old_jobs()]
        self._outputs.forget(job)
        for path in gone:
            await asyncio.to_thread(remove_tree, path)

    async def _remove_all(self, job: str) -> None:
        await self._remove_files(job)
        await asyncio.to_thread(remove_tree, self._folder.jobs / job)


@dataclass
class _JobOutput:
    """What has become of a job's output files."""

    settled: dict[str, Version] = field(default_factory=dict)
    """The files that are stored or can never be stored, with their versions at that time."""
    refused: set[str] = field(default_factory=set)
    """Names of the files that can never be stored."""
    lines: list[str] = field(default_factory=list)
    """Reasons why files can never be stored, which were not returned yet."""


def _files(folder: Path) -> Iterator[tuple[Path, Version]]:
    """Find the regular files. Links are skipped: they could lead outside the job's folder."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, (status.st_ctime_ns, status.st_size)
