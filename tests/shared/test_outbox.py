import asyncio

import pytest

from resile_shared.bus import streams
from resile_shared.bus.client import Bus
from resile_shared.bus.connection import Connection
from resile_shared.bus.envelope import Received
from resile_shared.bus.outbox import Outbox
from resile_shared.bus.subjects import EVENTS, JOB_EVENTS, job_events
from resile_shared.messages.jobs import JobEvent, JobState
from resile_shared.messages.reports import Ready
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS, until

from .examples import item, record


class Reader:
    """Keeps what the event stream holds, as a reader that drops nothing."""

    def __init__(self, bus: Bus) -> None:
        self.numbers: list[int] = []
        self._task = asyncio.create_task(bus.follow(EVENTS, JobEvent, self._note, subjects=(JOB_EVENTS,)))

    async def _note(self, received: Received[JobEvent]) -> None:
        assert received.subject == f"resile.job.{received.message.job}.{received.message.item.kind}"
        self.numbers.append(received.message.item.number)

    async def has(self, *numbers: int) -> bool:
        await until(lambda: len(self.numbers) >= len(numbers))
        return self.numbers == list(numbers)


async def publish(outbox: Outbox, *, num_items: int, num_published: int = 0) -> None:
    """Publish as the scheduler does that stored a record with these items."""
    outbox.put(record(num_items=num_items, num_published=num_published))
    await outbox.flush("job-1")


async def test_each_item_is_published_once_in_order(pool: Pool) -> None:
    outbox = Outbox(await pool.bus("scheduler"))
    reader = Reader(await pool.bus("monitor"))
    for num_items, num_published in ((0, 0), (1, 0), (4, 1), (4, 0), (6, 4)):
        await publish(outbox, num_items=num_items, num_published=num_published)
        assert outbox.unpublished("job-1") == ()
        assert outbox.jobs == ()
    assert await reader.has(1, 2, 3, 4, 5, 6)


async def test_an_event_describes_its_job_as_the_record_does(pool: Pool) -> None:
    """So that a replay of the history needs no records, of which the older ones are gone."""
    bus = await pool.bus("scheduler")
    ready = Ready(iterations_total=300, num_shards=24, batch_size=48, epochs=3, samples=4800, bits="same bits")
    stored = record(num_items=1)
    spec = stored.spec.model_copy(
        update={"tenant": "a", "min_workers": 2, "max_workers": 4, "sizes": (2, 4), "group": "sweep"}
    )
    stored = stored.model_copy(update={"spec": spec, "priority": 70})
    for known in (stored, stored.model_copy(update={"ready": ready, "unpublished": (item(2),)})):
        outbox = Outbox(bus)
        outbox.put(known)
        await outbox.flush("job-1")
        newest = await bus.last(EVENTS, JobEvent, subject=job_events("job-1"))
        assert newest is not None
        assert newest.message == JobEvent(
            job="job-1",
            name="digits",
            tenant="a",
            state=JobState.RUNNING,
            priority=70,
            item=known.unpublished[0],
            min_workers=2,
            max_workers=4,
            sizes=(2, 4),
            group="sweep",
            num_shards=24 if known.ready else None,
            iterations_total=300 if known.ready else None,
        )


async def test_another_scheduler_goes_on_where_the_last_was_and_an_old_one_adds_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late it wakes up: the bus remembers ids of messages for some minutes only."""
    monkeypatch.setattr(streams, "DUPLICATES", streams.timedelta(milliseconds=100))
    scheduler = await pool.bus("scheduler")
    reader = Reader(await pool.bus("monitor"))
    first, second = Outbox(scheduler), Outbox(scheduler)
    await publish(first, num_items=2)
    await publish(second, num_items=4)
    await asyncio.sleep(0.3)
    await publish(first, num_items=3)  # deposed, and behind: it had stored this before
    await publish(first, num_items=4)
    await publish(second, num_items=7, num_published=4)
    assert await reader.has(1, 2, 3, 4, 5, 6, 7)


async def test_two_schedulers_at_once_add_each_item_once(pool: Pool) -> None:
    outboxes = [Outbox(await pool.bus("scheduler", service=f"scheduler-{number}")) for number in range(2)]
    reader = Reader(await pool.bus("monitor"))
    for num_items in range(8, 65, 8):
        await asyncio.gather(*(publish(outbox, num_items=num_items) for outbox in outboxes))
    assert await reader.has(*range(1, 65))


async def test_of_a_removed_job_nothing_is_remembered(pool: Pool) -> None:
    """Thousands come and go. Where its events end is looked up again, should it be needed."""
    outbox = Outbox(await pool.bus("scheduler"))
    reader = Reader(await pool.bus("monitor"))
    await publish(outbox, num_items=2)
    outbox.put(record(num_items=3))
    await outbox.forget("job-1")
    assert outbox.jobs == ()
    outbox.put(record(num_items=3))
    assert outbox.num_unpublished == 3, "it is not known what is published"
    await outbox.flush("job-1")
    assert outbox.num_unpublished == 0
    assert await reader.has(1, 2, 3)


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
    await publish(outbox, num_items=1)
    request = scheduler.connection.request
    left = survived

    async def request_or_die(*args: object, **options: object) -> object:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return await request(*args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.connection, "request", request_or_die)
        try:
            await publish(outbox, num_items=6)
        except Killed:
            assert survived < 5
    await publish(Outbox(scheduler), num_items=6)
    await publish(Outbox(scheduler), num_items=7)
    assert await reader.has(1, 2, 3, 4, 5, 6, 7)


async def test_an_answer_that_is_lost_is_not_taken_for_another_scheduler(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = await pool.bus("scheduler")
    reader = Reader(await pool.bus("monitor"))
    outbox = Outbox(scheduler)
    await publish(outbox, num_items=1)
    request_once = Connection._request_once
    num_lost = 0

    async def lose_first_answer(connection: Connection, subject: str, *args: object, **options: object) -> object:
        nonlocal num_lost
        answer = await request_once(connection, subject, *args, **options)  # type: ignore[arg-type]
        if subject.startswith("resile.job.") and num_lost < 1:
            num_lost += 1
            raise TimeoutError
        return answer

    monkeypatch.setattr(Connection, "_request_once", lose_first_answer)
    await publish(outbox, num_items=3)
    assert num_lost == 1
    assert await reader.has(1, 2, 3)


async def test_a_crash_of_the_bus_under_load_loses_and_doubles_nothing(pool: Pool) -> None:
    outbox = Outbox(await pool.bus("scheduler"))
    reader = Reader(await pool.bus("monitor"))

    async def work() -> None:
        for num_items in range(1, 101):
            await publish(outbox, num_items=num_items, num_published=num_items - 1)

    publishing = asyncio.create_task(work())
    async with asyncio.timeout(PATIENCE_SECONDS):
        for _ in range(3):
            await asyncio.sleep(0.1)
            await pool.crash()
        await publishing
    assert await reader.has(*range(1, 101))
