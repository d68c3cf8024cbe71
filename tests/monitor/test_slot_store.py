"""Who held how many slots outlasts events and monitors, several monitors store the same, and it goes with its job."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from pydantic import BaseModel

from resile_monitor.history.slot_history import JobHistory, PoolHistory
from resile_monitor.history.slot_store import SlotStore
from resile_monitor.projection import Projection
from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.stream_reader import StreamReader
from resile_shared.bus.subjects import EVENTS, JOB_SLOTS, JOBS, POOL_SLOTS, POOL_SLOTS_KEY
from resile_shared.http.slot_history import SlotsView
from resile_shared.messages.hosts import HostGoodbye, HostJoined, HostLost, Slot
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobState
from resile_shared.messages.message import at
from resile_shared.messages.pool import PolicyEvent
from resile_shared.policies import PolicyName
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS

from .examples import job
from .monitors import Monitor, Monitors, Scene

BEGIN = 1_700_000_000


def change(number: int, seconds: int, workers: int, *, name: str = "job-1", kind: str = "allocation") -> JobEvent:
    return JobEvent(
        job=name,
        name="digits",
        tenant="default",
        state=JobState(kind) if kind in list(JobState) else JobState.RUNNING,
        priority=7000,
        item=HistoryItem(
            number=number, time=at(BEGIN + seconds), kind=kind, generation=1, workers=workers, iteration=number
        ),
    )


async def publish(bus: Bus, *events: JobEvent) -> None:
    for event in events:
        await bus.publish(subjects.job_event(event.job, event.item.kind), event)


def seconds_of(times: tuple[int, ...]) -> list[int]:
    return [round(time / 1000) - BEGIN for time in times]


def held(view: SlotsView, name: str = "job-1") -> list[tuple[int, int]]:
    """When a job held how many slots, without the beginning."""
    found = next((job.held for job in view.jobs if job.id == name), None)
    return list(zip(seconds_of(found.times), found.values, strict=True))[1:] if found else []


async def slots(monitor: Monitor, *, until: int) -> SlotsView:
    """Wait until a monitor has read the event of that sequence."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            view = await monitor.get("/v1/slots", SlotsView)
            if view.sequence >= until:
                return view
            await asyncio.sleep(0.05)


async def test_slots_outlast_events_and_monitors(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    for number, event in (
        (1, HostJoined(host="host-1", incarnation=1, time=at(BEGIN), slots=tuple(map(slot, range(4))))),
        (2, HostJoined(host="host-2", incarnation=1, time=at(BEGIN + 1), slots=tuple(map(slot, range(4))))),
        (3, HostLost(host="host-2", incarnation=1, time=at(BEGIN + 50))),
    ):
        what = "lost" if number == 3 else "joined"
        await scene.registry.publish(subjects.host_event(event.host, what), event)
    await publish(
        scene.scheduler,
        change(1, 10, 0, kind="accepted"),
        change(2, 20, 8),
        change(3, 40, 8, kind="priority"),
        change(4, 60, 4),
    )
    policy = PolicyEvent(number=1, time=at(BEGIN + 70), policy=PolicyName.PRIORITY, preemption=True)
    await scene.scheduler.publish(subjects.pool_event("policy"), policy)
    first = await monitors.start()
    before = await slots(first, until=8)
    assert held(before) == [(20, 8), (60, 4)]
    assert (seconds_of(before.slots.times), before.slots.values) == ([0, 1, 50], (4, 8, 4))
    assert (seconds_of(before.hosts.times), before.hosts.values) == ([0, 1, 50], (1, 2, 1))
    assert before.held.values[1:] == (8, 4)
    assert [(mark.kind, mark.about, mark.text) for mark in before.marks] == [
        ("joined", "host-1", ""),
        ("joined", "host-2", ""),
        ("submitted", "job-1", ""),
        ("priority", "job-1", "7000"),
        ("lost", "host-2", ""),
        ("policy", "pool", "priority"),
    ]
    first.process.send_signal(signal.SIGTERM)
    assert await first.process.wait() == 0
    await scene.scheduler.purge(EVENTS.name, subjects.job_events("job-1"))
    second = await monitors.start()
    assert await slots(second, until=8) == before
    await publish(scene.scheduler, change(5, 90, 0, kind="completed"))
    longer = await slots(second, until=9)
    assert held(longer) == [(20, 8), (60, 4), (90, 0)]
    await second.kill()
    third, fourth = await monitors.start(), await monitors.start()
    assert await slots(third, until=9) == longer, "what it had not stored is read again"
    assert await slots(fourth, until=9) == longer, "all monitors say the same"
    shorter = await third.get("/v1/slots?seconds=10", SlotsView)
    assert (shorter.end - shorter.begin, held(shorter)) == (10_000, [(90, 0)])
    assert shorter.jobs[0].held.values[0] == 4, "what it held at the beginning"
    assert "seconds" in (await third.problem("GET", "/v1/slots?seconds=0")).detail


def slot(index: int) -> Slot:
    return Slot(index=index)


class Keeper:
    """A slot store that follows the events, and knows that job-1 has a record."""

    def __init__(self, bus: Bus) -> None:
        self.projection = Projection()
        self.store = SlotStore(bus, self.projection)
        self.projection.store_job("job-1", job(), revision=1)
        self.following = asyncio.create_task(self.store.follow())

    async def view(self, *, until: int, seconds: int = 86_400) -> SlotsView:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                view = await self.store.view(seconds=seconds)
                if view.sequence >= until:
                    return view
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def buses(pool: Pool) -> AsyncIterator[tuple[Bus, Bus]]:
    yield await pool.bus("scheduler"), await pool.bus("monitor")


async def closed(*keepers: Keeper) -> None:
    for keeper in keepers:
        keeper.following.cancel()
    await asyncio.wait({keeper.following for keeper in keepers})


async def stored_sequences(bus: Bus) -> tuple[int, int]:
    """Up to which events the job and the pool are stored."""
    one, all_of_them = await bus.bucket(JOB_SLOTS).get("job-1"), await bus.bucket(POOL_SLOTS).get(POOL_SLOTS_KEY)
    return (one.value.sequence if one else 0), (all_of_them.value.sequence if all_of_them else 0)


async def test_monitors_that_store_the_same_slots_do_not_disturb_each_other(buses: tuple[Bus, Bus]) -> None:
    scheduler, bus = buses
    one, two = Keeper(bus), Keeper(bus)
    await publish(scheduler, change(1, 1, 2))
    assert await one.view(until=1) == await two.view(until=1)
    await one.store.store()
    await two.store.store()  # one was first, with the same
    assert await stored_sequences(bus) == (1, 1)
    await closed(one)
    await publish(scheduler, change(2, 2, 3))
    await two.view(until=2)
    await two.store.store()
    await two.store.store()
    assert await stored_sequences(bus) == (2, 2)
    await one.store.store()
    assert await stored_sequences(bus) == (2, 2), "who is behind replaces nothing"
    three = Keeper(bus)
    assert await three.view(until=2) == await two.view(until=2)
    await closed(two, three)


async def test_the_pool_is_stored_only_after_its_jobs(buses: tuple[Bus, Bus]) -> None:
    """Otherwise the events between are in no job for ever."""
    scheduler, bus = buses
    keeper = Keeper(bus)
    await publish(scheduler, change(1, 1, 2))
    await keeper.view(until=1)
    await bus.bucket(JOB_SLOTS).create("job-1", keeper.store._jobs.kept["job-1"].value.message(sequence=0))
    behind = await bus.bucket(JOB_SLOTS).get("job-1")
    assert behind is not None
    await bus.bucket(JOB_SLOTS).update(
        "job-1", behind.value.model_copy(update={"sequence": 0}), revision=behind.revision
    )
    await keeper.store.store()  # refused: it learns the revision
    assert await stored_sequences(bus) == (0, 0)
    await keeper.store.store()
    assert await stored_sequences(bus) == (1, 1)
    await closed(keeper)


async def test_a_stored_value_that_cannot_be_read_is_replaced(buses: tuple[Bus, Bus]) -> None:
    scheduler, bus = buses
    for subject in (JOB_SLOTS.subject("job-1"), POOL_SLOTS.subject(POOL_SLOTS_KEY)):
        headers: dict[str, str] = {"Nats-Msg-Id": subject}
        await bus.connection.request_store(subject, b'{"format": "of another version"}', headers=headers)
    keeper = Keeper(bus)
    await publish(scheduler, change(1, 1, 2))
    await keeper.view(until=1)
    for _ in range(3):  # it learns the revision of the job's value, replaces it, and does the same for the pool's
        await keeper.store.store()
    assert await stored_sequences(bus) == (1, 1)
    await bus.connection.request_store(JOB_SLOTS.subject("job-1"), b"{}", headers={"Nats-Msg-Id": "damaged"})
    keeper.projection.store_job("job-1", None, revision=2)
    await keeper.store.store()
    assert await bus.bucket(JOB_SLOTS).get("job-1") is None, "it goes with its job"
    await closed(keeper)


async def test_an_event_that_comes_while_others_are_stored_is_stored_the_next_time(
    buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, bus = buses
    keeper = Keeper(bus)
    await publish(scheduler, change(1, 1, 2))
    await keeper.view(until=1)
    store = keeper.store._jobs.store

    async def store_slowly(sequence: int, *, is_needed: Callable[[JobHistory], bool]) -> bool:
        await publish(scheduler, change(2, 2, 3))
        await keeper.view(until=2)
        return await store(sequence, is_needed=is_needed)

    with monkeypatch.context() as patch:
        patch.setattr(keeper.store._jobs, "store", store_slowly)
        await keeper.store.store()
    assert (await stored_sequences(bus))[1] == 1
    await keeper.store.store()
    assert await stored_sequences(bus) == (2, 2)
    await closed(keeper)


async def test_a_monitor_that_finds_older_slots_of_the_pool_stores_its_own_the_next_time(
    buses: tuple[Bus, Bus],
) -> None:
    scheduler, bus = buses
    keeper = Keeper(bus)
    await publish(scheduler, change(1, 1, 2))
    await keeper.view(until=1)
    await bus.bucket(POOL_SLOTS).create(POOL_SLOTS_KEY, PoolHistory().message())
    for expected in (0, 1):
        await keeper.store.store()
        assert await stored_sequences(bus) == (1, expected)
    await closed(keeper)


async def test_a_job_that_holds_slots_stays_in_the_chart_however_long_nothing_happens_to_it(
    buses: tuple[Bus, Bus],
) -> None:
    scheduler, bus = buses
    keeper = Keeper(bus)
    keeper.projection.store_job("job-2", job("job-2"), revision=1)
    await publish(scheduler, change(1, 1, 2), change(1, 4 * 86_400, 3, name="job-2"))
    await keeper.view(until=2)
    for _ in range(2):
        await keeper.store.store()
    view = await keeper.view(until=2, seconds=60)
    assert [(each.id, each.held.values[-1]) for each in view.jobs] == [("job-1", 2), ("job-2", 3)]
    await closed(keeper)


async def test_events_without_slots_at_the_end_of_the_stream_delay_no_answer(
    pool: Pool, buses: tuple[Bus, Bus]
) -> None:
    scheduler, bus = buses
    await publish(scheduler, change(1, 1, 2))
    learner = await pool.bus("learner")
    goodbye = HostGoodbye(host="host-1", incarnation=1, reason="its agent was stopped")
    await learner.publish(subjects.host_event("host-1", "goodbye"), goodbye)
    keeper = Keeper(bus)
    assert (await keeper.view(until=2)).jobs[0].held.values[-1] == 2
    await closed(keeper)


async def test_an_event_that_is_removed_before_it_is_read_delays_no_answer(
    buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the last job is deleted while a monitor starts."""
    scheduler, bus = buses
    await publish(scheduler, change(1, 1, 2), change(1, 2, 2, name="job-2"))
    follow = StreamReader.follow

    async def follow_late(reader: StreamReader[BaseModel], **options: Any) -> AsyncIterator[Received[BaseModel]]:
        await scheduler.purge(EVENTS.name, subjects.job_events("job-2"))
        async for received in follow(reader, **options):
            yield received

    monkeypatch.setattr(StreamReader, "follow", follow_late)
    keeper = Keeper(bus)
    assert [job.id for job in (await keeper.view(until=1)).jobs] == ["job-1"]
    await closed(keeper)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["stored before", "stored since"])
async def test_events_of_an_older_store_that_was_restored_are_in(
    pool: Pool, buses: tuple[Bus, Bus], is_ahead: bool
) -> None:
    """Those that it lacks are forgotten, also where another monitor has stored what they led to."""
    scheduler, bus = buses
    keeper = Keeper(bus)
    await publish(scheduler, change(1, 1, 2))
    await keeper.view(until=1)
    await keeper.store.store()
    await pool.back_up()
    await publish(scheduler, change(2, 5, 4), change(3, 6, 5))
    await keeper.view(until=3)
    await pool.restore()
    if is_ahead:
        for _ in range(2):
            await keeper.store.store()
        assert await stored_sequences(bus) == (3, 3)
    await publish(scheduler, change(2, 9, 3))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while held(view := await keeper.store.view(seconds=86_400)) != [(9, 3)]:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0.02)
    assert (view.sequence, view.held.values) == (2, (2, 3))
    for _ in range(2):
        await keeper.store.store()
    assert await stored_sequences(bus) == (2, 2)
    await closed(keeper)


async def test_slots_are_removed_with_their_job_and_those_of_all_jobs_stay(buses: tuple[Bus, Bus]) -> None:
    scheduler, bus = buses
    keeper = Keeper(bus)
    await publish(scheduler, change(1, 1, 2), change(2, 5, 0, kind="completed"))
    before = await keeper.view(until=2)
    await keeper.store.store()
    await scheduler.purge(JOB_SLOTS.stream, JOB_SLOTS.subject("job-1"))
    keeper.projection.store_job("job-1", None, revision=2)
    after = await keeper.view(until=2)
    assert (after.jobs, after.held) == ((), before.held)
    assert [mark.about for mark in after.marks] == []
    await keeper.store.store()
    assert keeper.store._jobs.kept == {}
    assert await stored_sequences(bus) == (0, 2)
    await closed(keeper)


async def test_a_job_that_is_removed_while_the_monitor_is_away_holds_no_slots(
    buses: tuple[Bus, Bus], scene: Scene
) -> None:
    scheduler, bus = buses
    for name in ("job-1", "job-2"):
        await scene.store_job(job(name))
    keeper = Keeper(bus)
    keeper.projection.store_job("job-2", job("job-2"), revision=2)
    await publish(scheduler, change(1, 1, 2), change(1, 2, 3, name="job-2"))
    assert (await keeper.view(until=2)).held.values[-1] == 5
    await keeper.store.store()
    await closed(keeper)
    await publish(scheduler, change(2, 5, 0, kind="completed"))
    await scheduler.purge(EVENTS.name, subjects.job_events("job-1"))
    entry = await scheduler.bucket(JOBS).get("job-1")
    assert entry is not None
    await scheduler.bucket(JOBS).delete("job-1", revision=entry.revision)
    later = Keeper(bus)
    later.projection.store_job("job-1", None, revision=3)
    assert (await later.view(until=2)).held.values[-1] == 3, "job-2 is there, known to the projection or not"
    await publish(scheduler, change(2, 9, 0, name="job-2"))
    assert (await later.view(until=4)).held.values[-1] == 0
    await closed(later)


async def test_a_job_that_held_nothing_lately_goes_on_where_it_is_stored(buses: tuple[Bus, Bus]) -> None:
    scheduler, bus = buses
    keeper = Keeper(bus)
    later = 4 * 86_400
    keeper.projection.store_job("job-2", job("job-2"), revision=1)
    await publish(scheduler, change(1, 1, 2), change(2, 5, 0, kind="paused"), change(1, later, 3, name="job-2"))
    await keeper.view(until=3)
    for _ in range(2):
        await keeper.store.store()
    assert list(keeper.store._jobs.kept) == ["job-2"], "the other one is only stored"
    await publish(scheduler, change(3, later + 5, 2))
    view = await keeper.view(until=4, seconds=60)
    assert held(view) == [(later + 5, 2)]
    assert [mark.about for mark in view.marks] == ["job-2"]
    kept = keeper.store._jobs.kept["job-1"].value
    assert kept.held.values == [2, 0, 2]
    assert [mark.kind for mark in kept.marks] == ["submitted"]
    await closed(keeper)


async def test_clocks_that_are_wrong_move_nothing_into_the_future(buses: tuple[Bus, Bus]) -> None:
    scheduler, bus = buses
    keeper = Keeper(bus)
    wrong = change(1, 0, 2)
    ahead = wrong.item.model_copy(update={"time": wrong.item.time + timedelta(days=36_500)})
    await publish(scheduler, wrong.model_copy(update={"item": ahead}), change(2, 9, 3))
    view = await keeper.view(until=2)
    assert view.end < 1000 * (BEGIN + 36_500 * 86_400)
    assert view.jobs[0].held.values[-1] == 3
    await closed(keeper)


async def test_what_cannot_be_read_at_the_end_of_the_stream_delays_no_answer(
    pool: Pool, buses: tuple[Bus, Bus]
) -> None:
    scheduler, bus = buses
    await publish(scheduler, change(1, 1, 2))
    headers: dict[str, str] = {"Nats-Msg-Id": "garbage"}
    await scheduler.connection.request_store(subjects.job_event("job-1", "allocation"), b"{}", headers=headers)
    keeper = Keeper(bus)
    assert (await keeper.view(until=1)).jobs[0].held.values == (2,)
    await closed(keeper)
