"""The scheduler as a service, on a real bus, with the real registry and agents that only act."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import resile_registry.service
import resile_scheduler.service
from resile_registry.settings import RegistrySettings
from resile_scheduler.settings import SchedulerSettings
from resile_shared import subjects
from resile_shared.bus import Bus
from resile_shared.envelope import Received
from resile_shared.messages.commands import Accepted, JobPause, JobPriority, JobResume, JobStop, JobSubmit, Refused
from resile_shared.messages.jobs import JobEvent, JobRecord, JobSpec
from resile_shared.subjects import EVENTS, JOB_EVENTS, JOBS
from resile_shared.testing.acting_agent import ActingAgent
from resile_shared.testing.fixtures import Pool
from resile_shared.testing.services import in_process
from resile_shared.testing.waiting import until


def spec(**changes: object) -> JobSpec:
    return JobSpec.model_validate({"name": "train", "package": "packages/1", "script": "train.py", **changes})


class Watcher:
    """What became of jobs, as everyone can read it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.records: dict[str, JobRecord] = {}
        self.events: list[JobEvent] = []

    async def records_change(self) -> None:
        async for changes in self._bus.bucket(JOBS).watch():
            self.records |= {change.key: change.value for change in changes if change.value is not None}

    async def events_come(self) -> None:
        async def note(received: Received[JobEvent]) -> None:
            self.events.append(received.message)

        await self._bus.follow(EVENTS, JobEvent, note, subjects=(JOB_EVENTS,))

    def state(self, job: str = "job-1") -> str:
        return self.records[job].state.value if job in self.records else "unknown"

    def workers(self, job: str = "job-1") -> int:
        """Members of the generation in force."""
        items = [item for item in self.records[job].history if item.kind == "allocation"] if job in self.records else []
        return items[-1].workers if items else 0

    def kinds(self, job: str = "job-1") -> list[str]:
        return [item.kind for item in self.records[job].history]

    async def all_events_of(self, job: str = "job-1") -> list[int]:
        """Wait until the history is published to its end; return the numbers as they were published."""
        end = len(self.records[job].history)
        await until(lambda: any(e.job == job and e.item.number == end for e in self.events))
        return [event.item.number for event in self.events if event.job == job]


class House:
    """A pool with a registry, and what a test does to it."""

    def __init__(self, pool: Pool, stack: AsyncExitStack, publisher: Bus, watcher: Watcher) -> None:
        self.pool = pool
        self.watcher = watcher
        self.publisher = publisher
        self._stack = stack

    async def agent(self, host: str, slots: int = 4, **options: int) -> ActingAgent:
        bus = await self.pool.bus("learner", service=f"agent of {host}")
        return await self._stack.enter_async_context(ActingAgent(bus, host, slots=slots, **options))

    async def submit(self, *, message_id: str | None = None, **changes: object) -> str:
        answer = await self.publisher.ask(
            subjects.command("job", "submit"), JobSubmit(spec=spec(**changes)), message_id=message_id
        )
        assert isinstance(answer, Accepted)
        assert answer.job_id is not None
        return answer.job_id

    async def ask(self, request: JobPriority | JobStop | JobPause | JobResume) -> Accepted | Refused:
        verb = type(request).__name__.removeprefix("Job").lower()
        return await self.publisher.ask(subjects.command("job", verb), request)


@pytest.fixture
async def house(pool: Pool) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(in_process(pool, "registry", resile_registry.service.run, RegistrySettings))
        watcher = Watcher(await pool.bus("monitor"))
        for work in (watcher.records_change(), watcher.events_come()):
            task = asyncio.create_task(work)
            stack.callback(task.cancel)
        yield House(pool, stack, await pool.bus("publisher"), watcher)


@asynccontextmanager
async def scheduler(pool: Pool, **settings: object) -> AsyncIterator[None]:
    async with in_process(pool, "scheduler", resile_scheduler.service.run, SchedulerSettings, **settings):
        yield


async def test_a_job_goes_from_its_submission_to_its_completion(house: House) -> None:
    async with scheduler(house.pool):
        agent = await house.agent("host-1")
        assert await house.submit() == "job-1"
        await until(lambda: house.watcher.state() == "running" and house.watcher.workers() == 4)
        await agent.complete("job-1")
        await until(lambda: house.watcher.state() == "completed")
        numbers = await house.watcher.all_events_of()
        assert numbers == list(range(1, len(numbers) + 1))
        kinds = [kind for kind in house.watcher.kinds() if kind != "queued"]
        assert kinds == ["accepted", "allocation", "completed"]
