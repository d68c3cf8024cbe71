"""The cache of datasets on a host: it survives damage and outages, holds its bound, and serves all that wait."""

import asyncio
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from resile_learner.agent import job_datasets as job_module
from resile_learner.agent.job_datasets import JobDatasets
from resile_learner.datasets import download as dataset_download
from resile_learner.datasets import host_datasets as module
from resile_learner.datasets.cache import DataFailed
from resile_learner.preparation import lock_folder
from resile_shared.storage import dataset_sources
from resile_shared.storage.dataset_sources import Listing, list_source
from resile_shared.storage.objects import ObjectStorage, StorageError
from resile_testing.waiting import PATIENCE_SECONDS, until

from .dataset_host import Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


class Blocked:
    """While it is open, reads of sources wait for `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reading = threading.Event()
        self.release = threading.Event()
        read_range = ObjectStorage.read_range

        def blocked(storage: ObjectStorage, key: str, start: int, stop: int) -> memoryview:
            self.reading.set()
            self.release.wait()
            return read_range(storage, key, start, stop)

        monkeypatch.setattr(ObjectStorage, "read_range", blocked)


def num_open(folder: Path) -> int:
    """How many descriptors this process has open below ``folder``; what other tests left may be closed at any time."""
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link).startswith(f"{folder.resolve()}/") for link in links)


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"sha256": 1, "num_bytes": "x", "file": null}', "\0" * 80])
async def test_a_damaged_note_of_a_dataset_has_it_fetched_again(host: Host, damage: str) -> None:
    few, other = host.source("few", x="4444"), host.source("other", x="4444")
    found = await host.get(few)
    os.close(found.lock)
    (found.path.parent / "complete").write_text(damage)
    await host.get(other)
    assert (await host.get(few)).path.joinpath("x").read_text() == "4444"
    assert host.num_fetched == 3


async def test_what_is_noted_is_on_the_disk_before_it_counts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    found = await host.get(host.source())
    assert sorted(synced[:2]) == ["one.txt", "two.txt"]
    assert synced[2:] == ["below", "data", "draft", found.path.parent.name]


async def test_fetches_at_the_same_time_fit_together(tmp_path: Path) -> None:
    host = Host(tmp_path, max_bytes=1000)
    datasets = [host.source(f"few-{number}", x="x" * 900) for number in range(4)]
    found = await asyncio.gather(*map(host.get, datasets), return_exceptions=True)
    assert sorted(type(each).__name__ for each in found) == ["CachedDataset", *["DataFailed"] * 3]
    assert "full of data that jobs use" in str(next(each for each in found if isinstance(each, DataFailed)))


async def test_the_disk_has_space_for_all_fetches_together(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    few, more = host.source("few", x="4444"), host.source("more", x="4444")
    monkeypatch.setattr(host.cache._cache, "_num_free", lambda: (64 << 20) + 7)
    blocked = Blocked(monkeypatch)
    getting = asyncio.create_task(host.get(few))
    await until(blocked.reading.is_set)
    with pytest.raises(DataFailed, match="are free on this host's disk"):
        await host.get(more)
    blocked.release.set()
    await getting
    assert await host.get(more), "what was fetched is no longer to come"


async def test_one_process_makes_room_at_a_time(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, cache = fcntl.flock, host.cache._cache
    contents = cache._contents
    locked: list[str] = []

    def check(doing: str) -> None:
        with pytest.raises(BlockingIOError):
            os.close(lock_folder(host.folder / "cache", fcntl.LOCK_EX | fcntl.LOCK_NB))
        locked.append(doing)

    def checked_flock(descriptor: int, kind: int) -> None:
        if kind == fcntl.LOCK_SH and "share" not in locked:
            check("share")
        flock(descriptor, kind)

    def checked_contents(own: Path) -> tuple[dict[Path, int], int, int]:
        check("make room")
        return contents(own)

    monkeypatch.setattr(fcntl, "flock", checked_flock)
    monkeypatch.setattr(cache, "_contents", checked_contents)
    await host.get(host.source())
    assert locked == ["make room", "share"]


async def test_what_a_killed_fetch_left_makes_room(tmp_path: Path) -> None:
    host = Host(tmp_path, max_bytes=1000)
    left = host.folder / ("0" * 32)
    (left / "data").mkdir(parents=True)
    (left / "reserved").write_text("900")
    (left / "data" / "x").write_text("x" * 900)
    await host.get(host.source("few", x="x" * 900))
    assert not left.exists()


async def test_a_fetch_that_cannot_fit_removes_nothing(tmp_path: Path) -> None:
    host = Host(tmp_path, max_bytes=10)
    unused = await host.get(host.source("unused", x="4444"))
    os.close(unused.lock)
    await host.get(host.source("used", x="4444"))
    with pytest.raises(DataFailed, match="full of data that jobs use"):
        await host.get(host.source("large", x="7777777"))
    assert unused.path.exists()


async def test_fetched_data_is_held_until_all_that_waited_hold_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []

    def lock(folder: Path, kind: int) -> int:
        if kind == fcntl.LOCK_SH:  # of one that waited
            with pytest.raises(BlockingIOError):
                os.close(lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB))
            held.append(True)
        return lock_folder(folder, kind)

    monkeypatch.setattr(module, "lock_folder", lock)
    dataset = host.source()
    before = num_open(host.folder)
    found = await asyncio.gather(host.get(dataset), host.get(dataset))
    assert held == [True, True]
    await asyncio.sleep(0)
    assert num_open(host.folder) == before + 2, "the fetch holds nothing any more"
    for each in found:
        os.close(each.lock)
    os.close(lock_folder(found[0].path.parent, fcntl.LOCK_EX | fcntl.LOCK_NB))


async def test_fetches_use_no_threads_that_others_need(host: Host, tmp_path: Path) -> None:
    jobs = JobDatasets(host.cache)
    few, storage, mounts = host.source(), (tmp_path / "job").as_uri(), [str(tmp_path)]
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    blocking = threading.Event()
    others = asyncio.create_task(asyncio.to_thread(blocking.wait))
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await jobs.get("job-1", 1, [few], storage=storage, mounts=mounts, on_line=host.lines.append)
    finally:
        blocking.set()
        await others
        await jobs.close()


async def test_the_source_is_listed_once_for_all_that_wait(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = host.source()
    listed: list[str] = []

    def count(uri: str, *, pool: str = "") -> Listing:
        listed.append(uri)
        return list_source(uri, pool=pool)

    monkeypatch.setattr(dataset_sources, "list_source", count)
    await asyncio.gather(*(host.get(dataset) for _ in range(5)))
    assert len(listed) == 2, "before and after the fetch"


async def test_a_source_in_a_folder_that_cannot_be_read_is_the_hosts_fault(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = host.source()

    def refuse(*_: object, **__: object) -> Any:
        raise StorageError("list it", "permission denied", "let this user read there")

    monkeypatch.setattr(ObjectStorage, "versions", refuse)
    with pytest.raises(DataFailed, match=r"dataset few: .*permission denied") as caught:
        await host.get(dataset)
    assert caught.value.is_hosts_fault
    elsewhere = dataset.model_copy(update={"uri": "pool:few"})
    (host.sources.parent / "pool" / "few").mkdir(parents=True)
    with pytest.raises(DataFailed, match="permission denied") as caught:
        await host.get(elsewhere)
    assert not caught.value.is_hosts_fault, "it is the same for all hosts"


async def test_a_short_outage_of_the_source_is_waited_for(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0)
    pool = (tmp_path / "pool").as_uri()
    ObjectStorage(pool).put("few/x", [b"1"])
    dataset = list_source("pool:few", pool=pool).registered("few", "pool:few")
    outages = iter(["list", "read"])

    def fail(name: str) -> None:
        call = getattr(ObjectStorage, name)

        def failing(*args: Any, **options: Any) -> Any:
            if verb := next(outages, None):
                raise StorageError(verb, "the storage cannot be reached", "check it", transient=True)
            return call(*args, **options)

        monkeypatch.setattr(ObjectStorage, name, failing)

    fail("versions")
    fail("read_range")
    assert (await host.get(dataset)).path.joinpath("x").read_text() == "1"
    assert sum("dataset few: waiting for the source: cannot" in line for line in host.lines) == 2


async def test_a_wait_for_the_source_ends_with_the_last_that_waits(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 3600)
    dataset = host.source().model_copy(update={"uri": "pool:few"})

    def fail(*_: object, **__: object) -> Any:
        raise StorageError("list it", "the storage cannot be reached", "check it", transient=True)

    monkeypatch.setattr(dataset_sources, "list_source", fail)
    getting = asyncio.create_task(host.get(dataset))
    await until(lambda: len(host.lines) == 1)
    getting.cancel()
    await until(lambda: not host.cache._fetches)


async def test_a_fetch_that_nobody_waits_for_ends_and_may_begin_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = host.source()
    blocked = Blocked(monkeypatch)
    getting = [asyncio.create_task(host.get(dataset)) for _ in range(2)]
    await until(blocked.reading.is_set)
    (fetch,) = host.cache._fetches.values()
    getting[0].cancel()
    await asyncio.wait([getting[0]])
    assert not fetch.cancelled.is_set()
    getting[1].cancel()
    await asyncio.wait([getting[1]])
    assert fetch.cancelled.is_set()
    again = asyncio.create_task(host.get(dataset))
    await asyncio.sleep(0)
    blocked.release.set()
    assert (await again).path.is_dir()
    assert fetch.task.done()


async def test_a_blocked_fetch_does_not_delay_the_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0)
    monkeypatch.setattr(dataset_download, "NUM_THREADS", 1)
    blocked = Blocked(monkeypatch)
    getting = asyncio.create_task(host.get(host.source()))
    await until(blocked.reading.is_set)
    await host.cache.close()
    assert not getting.done()
    blocked.release.set()
    with pytest.raises(DataFailed, match="not needed any more"):
        await getting
    with pytest.raises(DataFailed, match="not needed any more"):
        await host.get(host.source("other", x="1"))


async def test_progress_goes_to_each_job_that_waits_once(host: Host) -> None:
    dataset = host.source()
    lines: dict[str, list[str]] = {"job-1": [], "job-2": []}
    calls = [host.cache.get(dataset, lines[job].append, job=job) for job in ("job-1", "job-1", "job-2")]
    await asyncio.gather(*calls)
    assert lines["job-1"] == lines["job-2"]
    assert len(lines["job-1"]) == 2


async def test_a_job_goes_on_with_its_data_when_the_source_has_more(host: Host, tmp_path: Path) -> None:
    dataset = host.source()
    jobs = JobDatasets(host.cache)

    async def get(job: str) -> dict[str, str]:
        return await jobs.get(job, 1, [dataset], storage=(tmp_path / job).as_uri(), on_line=host.lines.append)

    first = await get("job-1")
    jobs.release("job-1", 1)
    (host.sources / "few" / "three.txt").write_text("more")
    assert await get("job-1") == first
    with pytest.raises(DataFailed, match="has changed since it was added"):
        await get("job-2")
    await jobs.close()


async def test_a_job_holds_each_dataset_once_on_a_host(host: Host, tmp_path: Path) -> None:
    dataset = host.source()
    jobs = JobDatasets(host.cache)

    async def get(worker: int) -> None:
        await jobs.get("job-1", worker, [dataset], storage=(tmp_path / "job").as_uri(), on_line=host.lines.append)

    await get(0)
    before = num_open(host.folder)
    for worker in range(1, 5):
        await get(worker)
    await asyncio.sleep(0)
    assert num_open(host.folder) == before
    await jobs.close()


@pytest.mark.parametrize("stored", [b"", b"[]", b"no JSON", b'{"few": 1}'])
async def test_damaged_digests_of_a_job_are_named(host: Host, tmp_path: Path, stored: bytes) -> None:
    storage = (tmp_path / "job").as_uri()
    ObjectStorage(storage).put(job_module.KEY, [stored])
    jobs = JobDatasets(host.cache)
    with pytest.raises(DataFailed, match=r"data.json of this job is damaged: submit the job again"):
        await jobs.get("job-1", 1, [host.source()], storage=storage, on_line=host.lines.append)


async def test_digests_wait_for_the_storage(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "RETRY_SECONDS", 0)
    read = ObjectStorage.read
    outages = iter([1, 2])

    def failing(storage: ObjectStorage, key: str) -> bytes:
        if next(outages, None):
            raise StorageError("read it", "the storage cannot be reached", "check it", transient=True)
        return read(storage, key)

    monkeypatch.setattr(ObjectStorage, "read", failing)
    jobs = JobDatasets(host.cache)
    storage = (tmp_path / "job").as_uri()
    assert await jobs.get("job-1", 1, [host.source()], storage=storage, on_line=host.lines.append)
    assert sum("waiting for the storage" in line for line in host.lines) == 2
    await jobs.close()
