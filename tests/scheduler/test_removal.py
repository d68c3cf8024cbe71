"""`resile delete` and retention on a real bus: nothing of a removed job is left, and no other job is touched."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import orjson
import pytest

from resile_shared.bus import buckets, subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.subjects import ALLOCATIONS, BUCKETS, EVENTS, HOSTS, JOBS, LOGS, PROGRESS, REPORTS, STREAMS
from resile_shared.messages.commands import Accepted, JobDelete, JobPriority, Refused
from resile_shared.messages.logs import LogLine, LogLines
from resile_shared.messages.message import at
from resile_shared.messages.reports import Progress
from resile_shared.storage.objects import ObjectStorage
from resile_testing.fake_agent import FakeAgent
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS, until

from .test_service import House, furnished, scheduler

pytest_plugins = ("tests.scheduler.test_service",)


async def subjects_of(bus: Bus, stream: str) -> dict[str, int]:
    answer = await bus.connection.request(f"$JS.API.STREAM.INFO.{stream}", orjson.dumps({"subjects_filter": ">"}))
    return dict(orjson.loads(answer.data)["state"].get("subjects") or {})


async def num_bytes(bus: Bus) -> int:
    total = 0
    for stream in (*STREAMS, *BUCKETS):
        name = stream.name if stream in STREAMS else stream.stream
        answer = await bus.connection.request(f"$JS.API.STREAM.INFO.{name}", b"")
        total += orjson.loads(answer.data)["state"]["bytes"]
    return total


async def trained(house: House, agent: FakeAgent, **changes: object) -> str:
    job = await house.submit(**changes)
    await until(lambda: house.watcher.state(job) == "running")
    await agent.report(job, 0, Progress(iteration=1, epoch=0))
    await agent.complete(job)
    await until(lambda: house.watcher.state(job) == "completed")
    return job


async def is_gone(bus: Bus, job: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), aclosing(bus.bucket(JOBS).watch()) as changes:
        async for batch in changes:
            if any(change.key == job and change.value is None for change in batch):
                return


async def test_nothing_of_a_deleted_job_is_left(house: House, tmp_path: Path) -> None:
    storage = ObjectStorage((tmp_path / "storage").as_uri())
    (tmp_path / "storage").mkdir(exist_ok=True)
    async with scheduler(house.pool, storage=storage.url):
        agent = await house.agent("host-1")
        first = await trained(house, agent, package="packages/shared")
        second = await trained(house, agent, package="packages/shared")
        for key in ("packages/shared", f"jobs/{first}/models/m", f"jobs/{second}/models/m"):
            storage.put(key, [b"content"])
        line = LogLine(time=at(0.0), stream="stdout", text="said")
        for job in (first, second):
            said = LogLines(job=job, host="host-1", incarnation=1, worker=0, lines=(line,))
            await agent.bus.publish(subjects.log(job), said)
        assert await house.ask(JobDelete(job_id=second)) == Accepted(job_id=second)
        bus = await house.pool.bus("scheduler", service="reader")
        await is_gone(bus, second)
        for stream in (EVENTS.name, REPORTS.name, PROGRESS.name, LOGS.name):
            left = await subjects_of(bus, stream)
            assert not [subject for subject in left if f".{second}" in subject]
            assert [subject for subject in left if f".{first}" in subject]
        assert await bus.bucket(ALLOCATIONS).get(second) is None
        assert set(storage.sizes("")) == {"packages/shared", f"jobs/{first}/models/m"}
        assert await house.ask(JobDelete(job_id=first)) == Accepted(job_id=first)
        await is_gone(bus, first)
        assert storage.sizes("") == {}
    async with scheduler(house.pool, storage=storage.url):  # one that never knew them
        assert await house.submit() == "job-3", "numbers never come again"
        again = await house.ask(JobDelete(job_id="job-3"))
        assert isinstance(again, Refused)
        assert again.code == "conflict"
        unknown = await house.ask(JobDelete(job_id=second))
        assert isinstance(unknown, Refused)
        assert unknown.code == "unknown"


async def test_a_record_that_cannot_be_read_costs_its_job_alone(house: House) -> None:
    async with scheduler(house.pool):
        assert await house.submit() == "job-1"
        assert await house.submit() == "job-2"
    bus = await house.pool.bus("scheduler", service="vandal")
    await bus.connection.request_store(JOBS.subject("job-2"), b'{"what": "is this"}')
    async with scheduler(house.pool):
        assert await house.submit() == "job-3", "its number is not given to another"
        assert isinstance(await house.ask(JobPriority(job_id="job-1", priority=1)), Accepted)
        assert isinstance(await house.ask(JobPriority(job_id="job-2", priority=1)), Refused)


@pytest.mark.parametrize("num_jobs", [30, pytest.param(300, marks=[pytest.mark.nightly])])
async def test_the_bytes_of_the_bus_do_not_grow_with_the_jobs_that_ended(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, num_jobs: int
) -> None:
    monkeypatch.setitem(buckets._PURGE, "Nats-TTL", "1s")  # so long a deletion can be seen
    async with furnished(pool, keep_jobs=5) as house, scheduler(pool):
        agent = await house.agent("host-1")
        bus = await pool.bus("scheduler", service="reader")
        sizes = []
        for _ in range(2):
            for _ in range(num_jobs):
                newest = await trained(house, agent)
            oldest = f"job-{int(newest.removeprefix('job-')) - 5}"
            await is_gone(bus, oldest)
            await until(lambda: len(house.watcher.kept) <= 5)
            await asyncio.sleep(2.0)  # the server removes what has expired once a second
            sizes.append(await num_bytes(bus))
        print(f"{sizes} bytes after {num_jobs} and {2 * num_jobs} jobs")
        async with asyncio.timeout(PATIENCE_SECONDS):  # a busy server removes it later
            while await num_bytes(bus) >= 1.1 * sizes[0]:  # noqa: ASYNC110 - what other processes do sets no event
                await asyncio.sleep(0.5)


async def test_a_host_that_left_is_forgotten_and_may_come_back(pool: Pool) -> None:
    async with furnished(pool, keep_days=1.0 / 86400) as house, scheduler(pool):
        bus = await pool.bus("registry", service="reader")
        for incarnation in (7, 1):  # the second has a new folder, and nobody knows of the first
            agent = await house.agent("host-1", incarnation=incarnation)
            job = await trained(house, agent)
            assert house.watcher.records[job].completed is not None
            await agent.goodbye()
            async with asyncio.timeout(PATIENCE_SECONDS), aclosing(bus.bucket(HOSTS).watch()) as changes:
                async for batch in changes:
                    if any(change.value is None for change in batch):
                        break
            assert not [subject for subject in await subjects_of(bus, EVENTS.name) if ".host-1." in subject]
