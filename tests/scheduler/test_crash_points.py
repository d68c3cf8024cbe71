"""The scheduler crashes before and after each write and message: the outcome is the same each time."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import resile_registry.service
from resile_registry.settings import RegistrySettings
from resile_shared.bus import subjects
from resile_shared.bus.nats_server import NatsServer
from resile_shared.bus.subjects import ALLOCATIONS, JOBS
from resile_shared.messages.commands import Accepted, JobPriority, JobSubmit
from resile_shared.messages.jobs import HistoryItem, JobRecord
from resile_testing.crash_points import CrashableService, Forker, Outcome, crash_at
from resile_testing.crashable import Point
from resile_testing.fake_agent import FakeAgent
from resile_testing.fixtures import Pool
from resile_testing.histories import check_history
from resile_testing.services import in_process
from resile_testing.waiting import until

from .test_service import Watcher, spec

NUM_SAMPLED = 8
DETECTION_SECONDS = 1.0
SECONDS = 60.0


class Scenario:
    """Two jobs on two hosts: submissions, a change of priority, the loss of a host, completions."""

    def __init__(self, forker: Forker, folder: Path, fatal: Point | None) -> None:
        self._folder = folder
        self._fatal = fatal
        self._forker = forker

    async def play(self) -> Outcome:
        async with AsyncExitStack() as stack:
            server = NatsServer(self._folder / "bus")
            await server.start()
            stack.push_async_callback(server.stop)
            pool = Pool(server, await stack.enter_async_context(AsyncExitStack()))
            detection = {"detection_seconds": DETECTION_SECONDS}
            registry = in_process(pool, "registry", resile_registry.service.run, RegistrySettings, **detection)
            await stack.enter_async_context(registry)
            flags = ("--credentials", str(server.credentials("scheduler")), "--log-level", "error")
            service = CrashableService(self._forker, *flags, fatal=self._fatal, log=self._folder / "points")
            await stack.enter_async_context(service.running())
            async with watching(pool) as watcher:
                async with asyncio.timeout(SECONDS):
                    await self._act(pool, watcher)
                outcome = await look(pool, watcher)
            return Outcome(outcome, service.points, len(service.ends))

    async def _act(self, pool: Pool, watcher: Watcher) -> None:
        requests = await pool.bus("monitor", service="requests")

        async def ask(request: JobSubmit | JobPriority, message_id: str) -> str | None:
            verb = type(request).__name__.removeprefix("Job").lower()
            answer = await requests.ask(subjects.command("job", verb), request, message_id=message_id)
            assert isinstance(answer, Accepted), answer
            return answer.job_id

        async with (
            FakeAgent(await pool.bus("learner", service="one"), "host-1", slots=2) as first,
            FakeAgent(await pool.bus("learner", service="two"), "host-2", slots=2) as second,
        ):
            assert await ask(JobSubmit(spec=spec()), "first") == "job-1"
            await until(lambda: shape(watcher) == {"job-1": 4})
            assert await ask(JobSubmit(spec=spec()), "second") == "job-2"
            await until(lambda: shape(watcher) == {"job-1": 2, "job-2": 2})
            await ask(JobPriority(job_id="job-2", priority=15_000), "raised")
            await until(lambda: shape(watcher) == {"job-1": 1, "job-2": 3})
            await second.vanish()
            await until(lambda: shape(watcher) == {"job-1": 1, "job-2": 1})
            await first.complete("job-1")
            await until(lambda: watcher.state("job-1") == "completed" and shape(watcher) == {"job-2": 2})
            await first.complete("job-2")
            await until(lambda: watcher.state("job-2") == "completed" and not alive(first))
            await until(lambda: not any(newest.placements for newest in first.allocations.values()))


def alive(agent: FakeAgent) -> list[tuple[str, int]]:
    return [key for key, worker in agent.workers.items() if worker.state != "gone"]


def shape(watcher: Watcher) -> dict[str, int]:
    """How many workers each job that runs has, by its newest history item."""
    running = {job: record for job, record in watcher.records.items() if record.state.value == "running"}
    return {job: record.allocation.workers for job, record in running.items() if record.allocation}


@asynccontextmanager
async def watching(pool: Pool) -> AsyncIterator[Watcher]:
    watcher = Watcher(await pool.bus("monitor"))
    task = asyncio.gather(watcher.records_change(), watcher.events_come())
    try:
        yield watcher
    finally:
        task.cancel()


async def look(pool: Pool, watcher: Watcher) -> dict[str, object]:
    """Check what must hold whatever happened; return what must be the same each time."""
    records: dict[str, JobRecord] = {
        key: entry.value for key, entry in (await watcher.bus.bucket(JOBS).entries()).items()
    }
    histories = {job: await check_history(pool, record) for job, record in records.items()}
    scheduler = await pool.bus("scheduler")
    assert not any(entry.value.placements for entry in (await scheduler.bucket(ALLOCATIONS).entries()).values())
    overlaps(histories)
    return {
        job: (record.state.value, record.priority, record.applied_commands, record.completed)
        for job, record in records.items()
    }


def overlaps(histories: Mapping[str, Iterable[HistoryItem]]) -> None:
    """The histories never show a slot for two jobs at one time."""
    ends = ("allocation", "completed", "failed", "stopped", "paused", "queued")
    items = sorted(
        ((item.time, item.number, job, item) for job, history in histories.items() for item in history),
        key=lambda found: found[:3],
    )
    held: dict[str, tuple[str, ...]] = {}
    for time, _, job, item in items:
        if item.kind in ends:
            held[job] = item.slots if item.kind == "allocation" else ()
        if not any(other != job and when == time for when, _, other, _ in items):
            slots = [slot for names in held.values() for slot in names]
            assert len(set(slots)) == len(slots), f"{item.time}: a slot is held twice: {held}"


async def play(forker: Forker, folder: Path, fatal: Point | None) -> Outcome:
    return await Scenario(forker, folder, fatal).play()


async def test_a_crash_at_some_points_changes_nothing(tmp_path: Path) -> None:
    await crash_at("scheduler", play, tmp_path, sample=NUM_SAMPLED)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
async def test_a_crash_at_any_point_changes_nothing(tmp_path: Path) -> None:
    await crash_at("scheduler", play, tmp_path)
