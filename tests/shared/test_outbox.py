import asyncio

import pytest

from resile_shared.bus import Bus
from resile_shared.envelope import Received
from resile_shared.messages.cursor import Cursor
from resile_shared.messages.jobs import JobEvent, JobRecord
from resile_shared.outbox import Outbox
from resile_shared.subjects import EVENTS, JOB_EVENTS, OUTBOX
from resile_shared.testing.fixtures import Pool

from .examples import record
from .waiting import until


class Reader:
    """Keeps what the event stream holds."""

    def __init__(self, bus: Bus) -> None:
        self.numbers: list[int] = []
        self._task = asyncio.create_task(bus.follow(EVENTS, JobEvent, self._note, subjects=(JOB_EVENTS,)))

    async def _note(self, received: Received[JobEvent]) -> None:
        assert received.subject == f"resile.job.{received.message.job}.{received.message.item.kind}"
        self.numbers.append(received.message.item.number)

    async def has(self, *numbers: int) -> bool:
        await until(lambda: len(self.numbers) >= len(numbers))
        return self.numbers == list(numbers)


async def test_each_item_is_published_once_in_order(pool: Pool) -> None:
    scheduler = await pool.bus("scheduler")
    reader = Reader(await pool.bus("monitor"))
    outbox = Outbox(scheduler)
    for num_items in (0, 1, 4, 4, 2, 6):  # 2: an older record arrives late
        await outbox.flush(record(num_items=num_items))
    assert await reader.has(1, 2, 3, 4, 5, 6)


async def test_another_scheduler_goes_on_where_the_last_was(pool: Pool) -> None:
    scheduler = await pool.bus("scheduler")
    reader = Reader(await pool.bus("monitor"))
    first, second = Outbox(scheduler), Outbox(scheduler)
    await first.flush(record(num_items=2))
    await second.flush(record(num_items=4))
    await first.flush(record(num_items=5))  # deposed, and behind
    await first.flush(record(num_items=6))
    await second.flush(record(num_items=7))
    assert await reader.has(1, 2, 3, 4, 5, 6, 7)


class Killed(Exception):
    pass


@pytest.mark.parametrize("survived", range(8))
async def test_a_crash_at_any_step_loses_and_doubles_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    """The scheduler dies in place of its call to the bus number ``survived``; another takes over."""
    scheduler = await pool.bus("scheduler")
    reader = Reader(await pool.bus("monitor"))
    outbox = Outbox(scheduler)
    await outbox.flush(record(num_items=1))
    request = scheduler.connection.request
    left = survived

    async def request_or_die(*args: object, **options: object) -> object:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return await request(*args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.MonkeyPatch.context():
        patch.setattr(scheduler.connection, "request", request_or_die)
        try:
            await outbox.flush(record(num_items=6))
        except Killed:
            assert survived < 6
    await Outbox(scheduler).flush(record(num_items=6))
    await Outbox(scheduler).flush(record(num_items=7))
    assert await reader.has(1, 2, 3, 4, 5, 6, 7)


async def test_a_crash_of_the_bus_under_load_loses_and_doubles_nothing(pool: Pool) -> None:
    scheduler = await pool.bus("scheduler")
    reader = Reader(await pool.bus("monitor"))
    outbox = Outbox(scheduler)

    async def publish() -> None:
        for num_items in range(1, 101):
            await outbox.flush(record(num_items=num_items))

    publishing = asyncio.create_task(publish())
    async with asyncio.timeout(60):
        for _ in range(3):
            await asyncio.sleep(0.1)
            await pool.crash()
        await publishing
    assert await reader.has(*range(1, 101))


async def test_a_removed_job_leaves_no_cursor(pool: Pool) -> None:
    scheduler = await pool.bus("scheduler")
    outbox = Outbox(scheduler)
    removed: JobRecord = record(num_items=1)
    await outbox.flush(removed)
    cursor = await scheduler.bucket(OUTBOX).get(removed.job)
    assert cursor is not None
    assert cursor.value == Cursor(number=1)
    await outbox.forget(removed.job)
    await outbox.forget(removed.job)
    assert await scheduler.bucket(OUTBOX).get(removed.job) is None
