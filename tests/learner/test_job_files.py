"""What workers leave on a host is removed when it is stored and no worker is here; of deleted jobs nothing stays."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from resile_learner.agent import job_files as module
from resile_learner.agent.folder import AgentFolder
from resile_learner.agent.job_files import JobFiles, Outputs
from resile_shared.bus.subjects import JOBS
from resile_shared.messages.jobs import JobRecord, JobSpec, JobState
from resile_shared.messages.message import at
from resile_testing.fixtures import Pool

from .agents import until

SPEC = JobSpec(name="train", package="packages/1", script="train.py")
RECORD = JobRecord(job="job-1", spec=SPEC, state=JobState.FAILED, priority=1, submitted=at(0.0))


class Host:
    """The files of one host, with the output and the log of one job, and the tasks that look after them."""

    def __init__(self, pool: Pool, folder: AgentFolder, storage: Path) -> None:
        self.pool = pool
        self.folder = folder
        self.stored = storage / "jobs/job-1/output/notes.txt"
        self.needed: set[str] = set()
        self._outputs = Outputs(storage.as_uri())
        self._tasks: list[asyncio.Task[None]] = []
        (folder.make_output("job-1") / "notes.txt").write_text("noted")
        (folder.jobs / "job-1" / "worker-0.log").touch()

    async def files(self) -> JobFiles:
        jobs = (await self.pool.bus("learner")).bucket(JOBS)
        return JobFiles(self.folder, self._outputs, jobs, upload=self._upload, needs=lambda job: job in self.needed)

    async def _upload(self, job: str) -> bool:
        return await self._outputs.upload(job, self.folder.output(job))

    def start(self, *work: Coroutine[Any, Any, None]) -> None:
        self._tasks += map(asyncio.create_task, work)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.folder.close()

    @property
    def left(self) -> set[str]:
        return {path.name for path in (self.folder.jobs / "job-1").iterdir()}


@pytest_asyncio.fixture
async def host(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    monkeypatch.setattr(module, "OUTPUT_SECONDS", 0.01)
    monkeypatch.setattr(module, "DELETED_SECONDS", 0.01)
    host = Host(pool, await AgentFolder.open(tmp_path / "agent"), tmp_path / "storage")
    yield host
    await host.close()


async def test_output_is_uploaded_while_a_worker_is_here_and_removed_when_it_is_stored(host: Host) -> None:
    await (await host.pool.bus("scheduler")).bucket(JOBS).create("job-1", RECORD)
    files = await host.files()
    host.needed = {"job-1"}
    host.start(files.upload(), files.remove_unneeded(), files.remove_deleted())
    await until(host.stored.exists)
    assert host.left == {"output", "worker-0.log"}
    host.needed = set()
    await until(lambda: host.left == {"worker-0.log"})


async def test_of_a_job_that_is_being_removed_nothing_is_uploaded_and_nothing_stays(host: Host) -> None:
    deleted = RECORD.model_copy(update={"is_deleted": True})
    await (await host.pool.bus("scheduler")).bucket(JOBS).create("job-1", deleted)
    host.start((await host.files()).remove_unneeded())
    await until(lambda: not (host.folder.jobs / "job-1").exists())
    assert not host.stored.exists()


async def test_the_logs_of_a_job_without_a_record_are_removed(host: Host) -> None:
    bucket = (await host.pool.bus("scheduler")).bucket(JOBS)
    revision = await bucket.create("job-1", RECORD)
    files = await host.files()
    host.start(files.remove_unneeded(), files.remove_deleted())
    await until(lambda: host.left == {"worker-0.log"})
    await bucket.delete("job-1", revision=revision)
    await until(lambda: not (host.folder.jobs / "job-1").exists())
