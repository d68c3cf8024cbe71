"""What a leader executes, in which order, and that one that was replaced executes nothing any more; on a real bus."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

import resile_scheduler.executor
from resile_scheduler.executor import Batch, Executor
from resile_scheduler.lease import LeadershipLost, Lease
from resile_shared.bus import subjects
from resile_shared.bus.buckets import Bucket, FencedError
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import (
    ALLOCATIONS,
    EVENTS,
    JOBS,
    LEASE,
    NUMBERS,
    NUMBERS_KEY,
    POLICY,
    TENANTS,
    USAGE,
    BucketSpec,
)
from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.commands import Accepted
from resile_shared.messages.instructions import AssignJobs, Instruction, PauseWorkers
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobRecord, JobState
from resile_shared.messages.message import at
from resile_shared.messages.pool import PolicyRecord, TenantsRecord
from resile_shared.messages.usage import RemovedUsage
from resile_testing.fixtures import Pool
from resile_testing.waiting import until

from .full_bus import limit_events, limit_records
from .test_core import spec

LONG = 60.0
"""A leader trusts its lease for so long without a look."""


def record(job: str) -> JobRecord:
    return JobRecord(job=job, spec=spec(), state=JobState.ACCEPTED, priority=5000, submitted=at(1000.0))


def allocation(job: str, epoch: int) -> Allocation:
    return Allocation(job=job, epoch=epoch, generation=1, placements=(), secret="s")


async def leader(bus: Bus, name: str, *, seconds: float = LONG) -> tuple[Lease, Executor]:
    """``seconds`` is for how long it trusts its lease."""
    lease = Lease(bus.bucket(LEASE), holder=name, seconds=seconds)
    await lease.acquire()

    def refuse(job: str, reason: str) -> None:
        raise AssertionError(f"{job}: {reason}")

    return lease, Executor(bus, lease, on_refused=refuse)


async def carry_out(executor: Executor, batch: Batch) -> None:
    executor.put(batch)
    task = asyncio.create_task(executor.run())
    done = asyncio.create_task(batch.done.wait())
    await asyncio.wait({task, done}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        done.cancel()
        task.result()
    task.cancel()


@pytest.mark.parametrize("stored_before", [False, True])
async def test_a_leader_that_was_replaced_creates_and_changes_nothing(pool: Pool, stored_before: bool) -> None:
    bus = await pool.bus("scheduler")
    old_lease, old = await leader(bus, "old")
    await old.read()
    late = [Batch(records=((record("job-1"), ()),)), Batch(allocations=(allocation("job-1", 1),))]
    if stored_before:
        for batch in late:
            await carry_out(old, batch)
    await old_lease.release()  # it does not notice that another one may lead
    _, new = await leader(bus, "new")
    found = await new.read()
    assert [one.job for one in found.records] == [one.job for one in found.allocations] == ["job-1"] * stored_before
    for batch in late:
        with pytest.raises(ExceptionGroup) as raised:
            await carry_out(old, Batch(records=batch.records, allocations=batch.allocations))
        assert raised.group_contains(FencedError, match="a writer with an epoch later than 1 has taken over")
    assert len(await bus.bucket(JOBS).keys()) == len(await bus.bucket(ALLOCATIONS).keys()) == stored_before
    await carry_out(new, Batch(records=((record("job-2"), ()),), allocations=(allocation("job-2", 2),)))
    assert "job-2" in await bus.bucket(JOBS).keys()


async def test_a_leader_that_was_replaced_before_it_read_does_not_begin(pool: Pool) -> None:
    bus = await pool.bus("scheduler")
    old_lease, old = await leader(bus, "old")
    await old_lease.release()
    _, new = await leader(bus, "new")
    await new.read()
    with pytest.raises(FencedError):
        await old.read()
    await carry_out(new, Batch(records=((record("job-1"), ()),)))


async def test_a_leader_that_was_replaced_answers_nothing_and_instructs_nobody(pool: Pool) -> None:
    """What it knows is old, and no fence keeps out who stores nothing."""
    bus = await pool.bus("scheduler")
    received: list[Received[Instruction]] = []

    async def note(instruction: Received[Instruction]) -> None:
        received.append(instruction)

    await (await pool.bus("learner")).subscribe(subjects.instruction("host-1"), Instruction, note)
    old_lease, old = await leader(bus, "old", seconds=0.0)
    await old.read()
    await old_lease.release()
    _, new = await leader(bus, "new")
    await new.read()
    answer = old.answer_to("request")
    answers = (("request", Accepted(job_id="job-1")),)
    pause = Instruction(PauseWorkers(epoch=1, job="job-1", lineage=1))
    with pytest.raises(LeadershipLost):
        await carry_out(old, Batch(answers=answers, instructions=(("host-1", pause),)))
    await bus.round_trip()
    assert not answer.done()
    assert not received


async def test_no_allocation_is_stored_before_its_record(pool: Pool) -> None:
    """Else nobody knows of its workers if the leader ends in between: here a later one takes over at that moment."""
    bus = await pool.bus("scheduler")
    lease, executor = await leader(bus, "old")
    await executor.read()
    await bus.bucket(JOBS).take_over(lease.epoch + 1)
    with pytest.raises(ExceptionGroup) as raised:
        await carry_out(executor, Batch(records=((record("job-1"), ()),), allocations=(allocation("job-1", 1),)))
    assert raised.group_contains(FencedError)
    assert not await bus.bucket(ALLOCATIONS).keys()


@pytest.mark.parametrize("what", [JOBS, POLICY, TENANTS], ids=lambda what: what.name)
async def test_no_request_is_answered_before_what_it_changed_is_stored(pool: Pool, what: BucketSpec[Any]) -> None:
    """Else what was accepted is forgotten if the leader ends in between: a later one takes over at that moment."""
    bus = await pool.bus("scheduler")
    lease, executor = await leader(bus, "old")
    await executor.read()
    await bus.bucket(what).take_over(lease.epoch + 1)
    answer = executor.answer_to("request")
    batch = Batch(
        records=((record("job-1"), ()),) if what is JOBS else (),
        policy=PolicyRecord(number=1),
        tenants=TenantsRecord(number=1),
        answers=(("request", Accepted()),),
    )
    with pytest.raises((FencedError, ExceptionGroup)):
        await carry_out(executor, batch)
    assert not answer.done()


async def test_what_removed_jobs_have_used_is_stored_before_anything_else(pool: Pool) -> None:
    """A record that says that it is counted must not be stored alone."""
    bus = await pool.bus("scheduler")
    lease, executor = await leader(bus, "old")
    await executor.read()
    await bus.bucket(JOBS).take_over(lease.epoch + 1)
    with pytest.raises(ExceptionGroup) as raised:
        await carry_out(executor, Batch(records=((record("job-1"), ()),), usage=(RemovedUsage(tenant="a"),)))
    assert raised.group_contains(FencedError)
    assert await bus.bucket(USAGE).keys() == ["a"]


async def test_of_a_job_that_is_removed_the_number_is_kept_and_the_record_goes_last(pool: Pool) -> None:
    """A leader that ends in between leaves a record, by which the next one goes on with the removal."""
    bus = await pool.bus("scheduler")
    lease, executor = await leader(bus, "old")
    await executor.read()
    await carry_out(executor, Batch(records=((record("job-7"), ()),), allocations=(allocation("job-7", 1),)))
    await bus.bucket(JOBS).take_over(lease.epoch + 1)
    with pytest.raises(FencedError):
        await executor.remove("job-7")
    assert await bus.bucket(JOBS).keys() == ["job-7"]
    assert await bus.bucket(ALLOCATIONS).keys() == []
    number = await bus.bucket(NUMBERS).get(NUMBERS_KEY)
    assert number is not None
    assert number.value.number == 7


async def test_a_slot_is_given_up_in_storage_before_it_is_given(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, executor = await leader(await pool.bus("scheduler"), "one")
    await executor.read()
    stored: list[str] = []
    put = Bucket.put

    async def slow_put(bucket: Bucket[Any], key: str, value: Any, **options: Any) -> Any:
        if key == "job-2":
            await asyncio.sleep(0.2)
        result = await put(bucket, key, value, **options)
        stored.append(key)
        return result

    monkeypatch.setattr(Bucket, "put", slow_put)
    placement = Placement(worker=1, host="host-1", incarnation=1, slot=0)
    given = allocation("job-1", 1).model_copy(update={"placements": (placement,)})
    await carry_out(executor, Batch(allocations=(given, allocation("job-2", 1))))
    assert stored == ["job-2", "job-1"]


async def test_no_agent_is_told_of_an_allocation_before_it_is_stored(pool: Pool) -> None:
    """Else one that is told not to watch a job, and later to watch it again, finds workers that are gone."""
    bus = await pool.bus("scheduler")
    received: list[Received[Instruction]] = []

    async def note(instruction: Received[Instruction]) -> None:
        received.append(instruction)

    await (await pool.bus("learner")).subscribe(subjects.instruction("host-1"), Instruction, note)
    lease, executor = await leader(bus, "old")
    await executor.read()
    await bus.bucket(ALLOCATIONS).take_over(lease.epoch + 1)
    assign = Instruction(AssignJobs(epoch=1, incarnation=1, jobs=()))
    with pytest.raises(ExceptionGroup) as raised:
        await carry_out(executor, Batch(allocations=(allocation("job-1", 1),), instructions=(("host-1", assign),)))
    assert raised.group_contains(FencedError)
    await bus.round_trip()
    assert not received


async def test_an_end_that_the_bus_refuses_even_in_brief_is_stored_once_it_can_be(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resile_scheduler.executor, "RETRY_SECONDS", 0.05)
    bus = await pool.bus("scheduler")
    lease = Lease(bus.bucket(LEASE), holder="leader", seconds=LONG)
    await lease.acquire()
    refused: list[str] = []
    executor = Executor(bus, lease, on_refused=lambda job, _: refused.append(job))
    await executor.read()
    await carry_out(executor, Batch(records=((record("job-1"), ()),)))
    await limit_records(bus, max_bytes=10)
    item = HistoryItem(
        number=1, time=at(1001.0), kind="stopped", generation=0, workers=0, slots=("host-1/0",), iteration=0
    )
    ended = record("job-1").model_copy(update={"state": JobState.STOPPED, "num_items": 1})
    await carry_out(executor, Batch(records=((ended, (item,)),)))
    assert refused == ["job-1"]
    tasks = [asyncio.create_task(work) for work in (executor.run(), executor.retry())]
    await limit_records(bus, max_bytes=-1)
    async with aclosing(bus.bucket(JOBS).watch()) as watched:
        async for changes in watched:
            stored = changes[-1].value
            assert stored is not None
            if stored.state is JobState.STOPPED:
                break
    assert [item.kind for item in stored.unpublished] == ["stopped"]
    for task in tasks:
        task.cancel()


async def test_an_event_that_the_bus_refuses_is_published_once_it_can_be(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resile_scheduler.executor, "RETRY_SECONDS", 0.05)
    bus = await pool.bus("scheduler")
    _, executor = await leader(bus, "leader")
    await executor.read()
    await limit_events(bus, max_bytes=10)
    item = HistoryItem(number=1, time=at(1001.0), kind="stopped", generation=0, workers=0, slots=(), iteration=0)
    ended = record("job-1").model_copy(update={"state": JobState.STOPPED, "num_items": 1})
    await carry_out(executor, Batch(records=((ended, (item,)),)))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in (executor.publish(), executor.retry())]
        await until(lambda: "history not published job=job-1" in caplog.text)
        await limit_events(bus, max_bytes=-1)
        events = bus.read_stream(EVENTS, JobEvent, subject=subjects.job_events("job-1"))
        async with aclosing(events.follow(after=0)) as published:
            assert (await anext(published)).message.item == item
        await until(lambda: not executor.num_unpublished)
        for task in tasks:
            task.cancel()
