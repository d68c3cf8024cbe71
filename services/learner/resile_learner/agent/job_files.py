"""What the workers of jobs leave on a host: uploaded as they write it, and removed once no worker is here.

The logs of the newest jobs stay. Nothing stays of a job that was deleted (its record says so, or is gone), and nothing
of it is uploaded any more.
"""

import asyncio
from collections.abc import Awaitable, Callable

from resile_shared.bus.buckets import Bucket
from resile_shared.errors import ResileError
from resile_shared.folders import remove_tree
from resile_shared.messages.jobs import JobRecord

from .folder import AgentFolder
from .outputs import Outputs

OUTPUT_SECONDS = 5.0
DELETED_SECONDS = 300.0
"""Seconds between two checks whether the jobs that have only logs here were deleted."""


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
