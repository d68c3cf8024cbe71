"""What is removed of jobs, on a real bus and in real storage."""

import asyncio
from pathlib import Path

import pytest

from resile_scheduler.core.events import RemoveJob
from resile_scheduler.executor import Batch, Executor
from resile_scheduler.lease import LeadershipLost, Lease
from resile_scheduler.remover import Remover
from resile_shared.bus.subjects import JOBS, LEASE
from resile_shared.messages.jobs import JobState
from resile_shared.messages.reports import CheckpointSaved
from resile_shared.storage.objects import ObjectStorage, StorageError
from resile_testing.fixtures import Pool
from resile_testing.waiting import until

from .full_bus import limit_records
from .test_executor import record


async def test_a_scheduler_that_was_frozen_does_not_delete_a_package_that_was_uploaded_again(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    bus, loop = await pool.bus("scheduler"), asyncio.get_running_loop()
    lease = Lease(bus.bucket(LEASE), holder="first", seconds=60.0, clock=lambda: now)
    await lease.acquire()
    storage = ObjectStorage(tmp_path.as_uri())
    for key in ("jobs/job-1/checkpoints/1", "packages/1.tar.gz"):
        storage.create(key, b"content")
    delete_folder = ObjectStorage.delete_folder

    def delete_and_freeze(self: ObjectStorage, prefix: str) -> None:
        nonlocal now
        delete_folder(self, prefix)
        next_leader = Lease(bus.bucket(LEASE), holder="second", seconds=0.1)
        asyncio.run_coroutine_threadsafe(next_leader.acquire(), loop).result()
        now += 61.0

    monkeypatch.setattr(ObjectStorage, "delete_folder", delete_and_freeze)
    executor = Executor(bus, lease, on_refused=lambda job, reason: None)
    remover = Remover(bus, lease, executor, storage.url, on_removed=lambda job: None)
    remover.put(RemoveJob("job-1", "packages/1.tar.gz"))
    with pytest.raises(LeadershipLost):
        await remover.run()
    assert not storage.sizes("jobs/job-1")
    assert storage.size("packages/1.tar.gz") == len(b"content")


async def test_nothing_is_removed_of_a_job_while_the_bus_does_not_store_that_it_is_deleted(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next scheduler would find a job that runs, whose checkpoints and history are gone."""
    monkeypatch.setattr("resile_scheduler.remover.RETRY_SECONDS", 0.05)
    monkeypatch.setattr("resile_scheduler.executor.RETRY_SECONDS", 0.05)
    bus = await pool.bus("scheduler")
    lease = Lease(bus.bucket(LEASE), holder="first", seconds=60.0)
    await lease.acquire()
    storage = ObjectStorage(tmp_path.as_uri())
    storage.create("jobs/job-1/checkpoints/1", b"content")
    executor = Executor(bus, lease, on_refused=lambda job, reason: None)
    await executor.read()
    removed: asyncio.Queue[str] = asyncio.Queue()
    remover = Remover(bus, lease, executor, storage.url, on_removed=removed.put_nowait)
    running = record("job-1")
    deleted = running.model_copy(update={"state": JobState.STOPPED, "is_deleted": True})
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in (executor.run(), executor.retry(), remover.run())]
        for newest, max_bytes in ((running, -1), (deleted, 10)):
            await limit_records(bus, max_bytes=max_bytes)
            batch = Batch(records=((newest, ()),))
            executor.put(batch)
            await batch.done.wait()
        remover.put(RemoveJob("job-1", ""))
        await until(lambda: "job not removed yet" in caplog.text)
        assert storage.sizes("jobs/job-1")
        await limit_records(bus, max_bytes=-1)
        assert await removed.get() == "job-1"
        for task in tasks:
            task.cancel()
    assert not storage.sizes("jobs/job-1")
    assert await bus.bucket(JOBS).keys() == []


async def test_a_job_is_removed_once_however_often_that_is_decided(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resile_scheduler.remover.RETRY_SECONDS", 0.0)
    bus = await pool.bus("scheduler")
    lease = Lease(bus.bucket(LEASE), holder="first", seconds=60.0)
    await lease.acquire()
    storage = ObjectStorage(tmp_path.as_uri())
    storage.create("packages/1.tar.gz", b"content")
    delete_folder = ObjectStorage.delete_folder
    faults = iter([StorageError("delete", "no answer", "try again")])

    def fail_once(self: ObjectStorage, prefix: str) -> None:
        for fault in faults:
            raise fault
        delete_folder(self, prefix)

    removed: asyncio.Queue[str] = asyncio.Queue()

    def upload_again(job: str) -> None:
        if job == "job-1" and removed.empty():
            storage.create("packages/1.tar.gz", b"of a new job")
            remover.put(RemoveJob("job-2", "packages/2.tar.gz"))
        removed.put_nowait(job)

    monkeypatch.setattr(ObjectStorage, "delete_folder", fail_once)
    executor = Executor(bus, lease, on_refused=lambda job, reason: None)
    await executor.read()
    remover = Remover(bus, lease, executor, storage.url, on_removed=upload_again)
    for _ in range(3):
        remover.put(RemoveJob("job-1", "packages/1.tar.gz"))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(remover.run())
        assert [await removed.get(), await removed.get()] == ["job-1", "job-2"]
        running.cancel()
    assert storage.size("packages/1.tar.gz") == len(b"of a new job")


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_job_is_removed_once_its_storage_shows_the_checkpoint_that_it_has_stored(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, comes_back: bool
) -> None:
    """A folder that is not mounted is empty, and the lists of a store may be old: what they lack would stay."""
    monkeypatch.setattr("resile_scheduler.remover.RETRY_SECONDS", 0.05)
    bus = await pool.bus("scheduler")
    lease = Lease(bus.bucket(LEASE), holder="first", seconds=60.0)
    await lease.acquire()
    storage = ObjectStorage(tmp_path.as_uri())
    checkpoint = "jobs/job-1/checkpoints/lineage-2/000000000040-g7"
    storage.create("jobs/job-1/checkpoints/lineage-2/000000000020-g7/manifest.json", b"an older one")
    executor = Executor(bus, lease, on_refused=lambda job, reason: None)
    await executor.read()
    removed: asyncio.Queue[str] = asyncio.Queue()
    remover = Remover(bus, lease, executor, storage.url, on_removed=removed.put_nowait)
    remover.put(RemoveJob("job-1", "", checkpoint=CheckpointSaved(lineage=2, iteration=40, num_bytes=1)))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(remover.run())
        await until(lambda: "the checkpoint of iteration 40 is not there" in caplog.text)
        assert removed.empty()
        if comes_back:
            for name in ("part-00000", "manifest.json"):
                storage.create(f"{checkpoint}/{name}", b"content")
        assert await removed.get() == "job-1", "also if somebody has removed it"
        running.cancel()
    assert not storage.sizes("jobs/job-1")


async def test_a_job_without_a_checkpoint_is_removed_once_its_storage_shows_its_package(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have stored parts, and a checkpoint that nobody has reported: in a folder that is not mounted now."""
    monkeypatch.setattr("resile_scheduler.remover.RETRY_SECONDS", 0.05)
    bus = await pool.bus("scheduler")
    lease = Lease(bus.bucket(LEASE), holder="first", seconds=60.0)
    await lease.acquire()
    storage = ObjectStorage(tmp_path.as_uri())
    executor = Executor(bus, lease, on_refused=lambda job, reason: None)
    await executor.read()
    removed: asyncio.Queue[str] = asyncio.Queue()
    remover = Remover(bus, lease, executor, storage.url, on_removed=removed.put_nowait)
    remover.put(RemoveJob("job-1", "packages/1.tar.gz", is_package_used=True))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(remover.run())
        await until(lambda: "its package packages/1.tar.gz is not there" in caplog.text)
        assert removed.empty()
        storage.create("jobs/job-1/checkpoints/lineage-1/000000000020-g7/manifest.json", b"not reported")
        storage.create("packages/1.tar.gz", b"content")
        assert await removed.get() == "job-1"
        running.cancel()
    assert not storage.sizes("jobs/job-1")
    assert storage.sizes("packages/") == {"packages/1.tar.gz": len(b"content")}
