"""``kill -9`` of the bus under load loses nothing and doubles nothing."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from resile_shared.bus import subjects
from resile_shared.bus.buckets import ConflictError
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import EVENTS, HELLOS, JOBS
from resile_shared.messages.commands import Accepted, JobStop
from resile_shared.messages.hosts import HostHello
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS, until

from .examples import hello, record

NUM_CRASHES = 4


class Load:
    """Work that goes on while the server crashes again and again."""

    def __init__(self) -> None:
        self.is_over = False

    async def under_crashes(self, pool: Pool, *work: Coroutine[Any, Any, None]) -> None:
        tasks = [asyncio.create_task(each) for each in work]
        async with asyncio.timeout(PATIENCE_SECONDS):
            for _ in range(NUM_CRASHES):
                await asyncio.sleep(0.2)  # let some work be under way; any moment is right
                await pool.crash()
            self.is_over = True
            await asyncio.gather(*tasks)


async def test_events_are_neither_lost_nor_doubled(pool: Pool) -> None:
    registry = await pool.bus("registry")
    publishers = [await pool.bus("learner", service=f"learner-{number}") for number in range(3)]
    sent: list[int] = []
    handled: list[int] = []
    load = Load()

    async def handle(received: Received[HostHello]) -> None:
        handled.append(received.message.incarnation)

    async def publish(bus: Bus, first: int) -> None:
        number = first
        while not load.is_over:
            sent.append(number)
            await bus.publish(subjects.host_event("host-1", "hello"), hello(number))
            number += 1

    follower = asyncio.create_task(registry.follow(EVENTS, HostHello, handle, subjects=(HELLOS,)))
    await load.under_crashes(pool, *(publish(bus, 1_000_000 * n) for n, bus in enumerate(publishers, start=1)))
    await until(lambda: len(handled) >= len(sent))
    assert sorted(handled) == sorted(sent)
    assert not follower.done()
    follower.cancel()


async def test_compare_and_set_is_neither_lost_nor_doubled(pool: Pool) -> None:
    buses = [await pool.bus("scheduler", service=f"scheduler-{number}") for number in range(3)]
    await buses[0].bucket(JOBS).create("job-1", record())
    added: list[str] = []
    load = Load()

    async def add(bus: Bus, mark: str) -> None:
        """Add the mark to a collection, unless it is there."""
        jobs = bus.bucket(JOBS)
        while (entry := await jobs.get("job-1")) is not None and mark not in entry.value.spec.args:
            with suppress(ConflictError):
                await jobs.update("job-1", record(args=(*entry.value.spec.args, mark)), revision=entry.revision)

    async def write(bus: Bus, name: str) -> None:
        number = 0
        while not load.is_over:
            added.append(f"{name}-{number}")
            await add(bus, added[-1])
            number += 1

    await load.under_crashes(pool, *(write(bus, name) for name, bus in zip("abc", buses, strict=True)))
    entry = await buses[0].bucket(JOBS).get("job-1")
    assert entry is not None
    assert sorted(entry.value.spec.args) == sorted(added)


async def test_requests_are_answered_and_have_their_effect_once(pool: Pool) -> None:
    scheduler = await pool.bus("scheduler")
    publisher = await pool.bus("publisher")
    stop = subjects.command("job", "stop")
    effects: list[str] = []
    load = Load()

    async def handle(received: Received[JobStop]) -> Accepted:
        effects.append(received.message.job_id)
        return Accepted(job_id=received.message.job_id)

    async def ask() -> None:
        while not load.is_over:
            number = len(effects)
            answer = await publisher.ask(stop, JobStop(job_id=f"job-{number}"))
            assert answer == Accepted(job_id=f"job-{number}")

    await scheduler.answer(stop, JobStop, handle)
    await load.under_crashes(pool, ask())
    assert effects == [f"job-{number}" for number in range(len(effects))]
