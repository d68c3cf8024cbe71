"""What a leader executes, in which order, and that one that was replaced executes nothing any more; on a real bus."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

import resile_scheduler.executor
from resile_scheduler.executor import Batch, Executor
from resile_scheduler.lease import LeadershipLost, Lease
from resile_shared.bus import subjects
from resile_shared.bus.buckets import Bucket, Entry, FencedError
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
    POLICY_KEY,
    TENANTS,
    TENANTS_KEY,
    USAGE,
    BucketSpec,
)
from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.commands import Accepted, Refused
from resile_shared.messages.instructions import AssignJobs, Instruction, PauseWorkers
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobRecord, JobState
from resile_shared.messages.message import at
from resile_shared.messages.pool import PolicyEvent, PolicyRecord, TenantEvent, TenantShare, TenantsRecord
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


def item(number: int, kind: str = "allocation", *, reason: str = "", slots: tuple[str, ...] = ()) -> HistoryItem:
    return HistoryItem(
        number=number,
        time=at(1000.0 + number),
        kind=kind,
        generation=0,
        workers=0,
        slots=slots,
        iteration=0,
        reason=reason,
    )


def in_state(state: JobState, *, job: str = "job-1", num_items: int = 0) -> JobRecord:
    return record(job).model_copy(update={"state": state, "num_items": num_items})


async def tolerant(bus: Bus) -> tuple[Executor, list[str]]:
    """A leader that has read what is stored, and the jobs that it reports as refused."""
    lease = Lease(bus.bucket(LEASE), holder="leader", seconds=LONG)
    await lease.acquire()
    refused: list[str] = []
    executor = Executor(bus, lease, on_refused=lambda job, _: refused.append(job))
    await executor.read()
    return executor, refused


async def stored_record(bus: Bus) -> Entry[JobRecord] | None:
    return await bus.bucket(JOBS).get("job-1")


async def test_requests_are_answered_once_what_they_changed_is_stored(pool: Pool) -> None:
    executor, _ = await tolerant(await pool.bus("scheduler"))
    given = (("one", Accepted(job_id="job-1")), ("two", Refused(code="unknown", reason="there is none")))
    futures = [executor.answer_to(command) for command, _ in given]
    await carry_out(executor, Batch(records=((record("job-1"), ()),), answers=given))
    assert [future.result() for future in futures] == [answer for _, answer in given]


async def test_a_job_that_the_bus_refuses_is_not_accepted(pool: Pool) -> None:
    bus = await pool.bus("scheduler")
    executor, refused = await tolerant(bus)
    await limit_records(bus, max_bytes=10)
    answer = executor.answer_to("request")
    answers = (("request", Accepted(job_id="job-1")),)
    await carry_out(executor, Batch(records=((record("job-1"), (item(1),)),), answers=answers))
    assert refused == ["job-1"]
    response = answer.result()
    assert isinstance(response, Refused)
    assert (response.code, response.reason) == (
        "unavailable",
        "job-1 cannot be stored: the scheduler's log says why",
    )


async def test_instructions_are_sent_to_the_hosts_that_they_are_for(pool: Pool) -> None:
    received: asyncio.Queue[Instruction] = asyncio.Queue()

    async def note(instruction: Received[Instruction]) -> None:
        received.put_nowait(instruction.message)

    bus = await pool.bus("scheduler")
    await (await pool.bus("learner")).subscribe(subjects.instruction("host-1"), Instruction, note)
    executor, _ = await tolerant(bus)
    given = [Instruction(PauseWorkers(epoch=1, job=f"job-{number}", lineage=1)) for number in (1, 2)]
    await carry_out(executor, Batch(instructions=tuple(("host-1", each) for each in given)))
    assert [await received.get() for _ in given] == given


async def test_the_items_of_a_history_are_published_once_they_are_stored(pool: Pool) -> None:
    bus = await pool.bus("scheduler")
    executor, _ = await tolerant(bus)
    publishing = asyncio.create_task(executor.publish())
    await carry_out(executor, Batch(records=((in_state(JobState.QUEUED, num_items=1), (item(1),)),)))
    events = bus.read_stream(EVENTS, JobEvent, subject=subjects.job_events("job-1"))
    async with aclosing(events.follow(after=0)) as published:
        assert (await anext(published)).message.item == item(1)
    publishing.cancel()


async def pool_events(bus: Bus, what: str) -> list[PolicyEvent | TenantEvent]:
    """All that is published of a change of the pool, until now."""
    kind: type[PolicyEvent | TenantEvent] = PolicyEvent if what == "policy" else TenantEvent
    newest = await bus.last(EVENTS, kind, subject=subjects.pool_event(what))
    found: list[PolicyEvent | TenantEvent] = []
    if newest is not None:
        reader = bus.read_stream(EVENTS, kind, subject=subjects.pool_event(what))
        async with aclosing(reader.follow(after=0)) as published:
            async for received in published:
                found.append(received.message)
                if received.sequence == newest.sequence:
                    break
    return found


async def test_each_change_of_the_policy_is_published_once(pool: Pool) -> None:
    bus = await pool.bus("scheduler")
    executor, _ = await tolerant(bus)
    await carry_out(executor, Batch(policy=PolicyRecord(number=1)))
    assert await pool_events(bus, "policy") == [], "nobody has changed it"
    for number in (2, 2, 3):
        await carry_out(executor, Batch(policy=PolicyRecord(number=number, changed=at(1000.0 + number))))
    assert [event.number for event in await pool_events(bus, "policy")] == [2, 3]


async def test_each_change_of_a_tenant_is_published_once_with_its_share(pool: Pool) -> None:
    bus = await pool.bus("scheduler")
    executor, _ = await tolerant(bus)
    share = TenantShare(weight=3)
    for number, tenant in ((1, None), (2, "a"), (2, "a"), (3, "b")):
        changed = TenantsRecord(number=number, changed=at(1000.0 + number), tenant=tenant, tenants={"a": share})
        await carry_out(executor, Batch(tenants=changed))
    events = await pool_events(bus, "tenant")
    assert all(isinstance(event, TenantEvent) for event in events)
    assert [(event.number, event.tenant, event.share) for event in events if isinstance(event, TenantEvent)] == [
        (2, "a", share),
        (3, "b", None),
    ]


async def test_a_change_that_a_leader_stored_and_did_not_publish_is_published_by_the_next_one(pool: Pool) -> None:
    bus = await pool.bus("scheduler")
    lease, old = await leader(bus, "old")
    await old.read()
    changed = at(1000.0)
    fence = await bus.bucket(POLICY).take_over(lease.epoch)
    await bus.bucket(POLICY).put(POLICY_KEY, PolicyRecord(number=1, changed=changed), fence=fence)
    fence = await bus.bucket(TENANTS).take_over(lease.epoch)
    await bus.bucket(TENANTS).put(TENANTS_KEY, TenantsRecord(number=1, changed=changed, tenant="a"), fence=fence)
    for name in ("new", "newest"):
        await lease.release()
        lease, new = await leader(bus, name)
        await new.read()
        for what in ("policy", "tenant"):
            assert [event.number for event in await pool_events(bus, what)] == [1], what


async def test_the_number_of_a_removed_job_is_never_replaced_by_a_lower_one(pool: Pool) -> None:
    """Else another job gets the id of one that is gone, and with it what is left of it anywhere."""
    bus = await pool.bus("scheduler")
    executor, _ = await tolerant(bus)
    assert (await bus.bucket(NUMBERS).get(NUMBERS_KEY)) is None
    for job in ("job-7", "job-3"):
        await carry_out(executor, Batch(records=((record(job), ()),)))
        await executor.remove(job)
    number = await bus.bucket(NUMBERS).get(NUMBERS_KEY)
    assert number is not None
    assert number.value.number == 7


async def test_a_pool_without_jobs_has_used_no_number(pool: Pool) -> None:
    _, executor = await leader(await pool.bus("scheduler"), "leader")
    assert (await executor.read()).last_number == 0


async def test_of_a_removed_job_nothing_is_left_to_publish(pool: Pool) -> None:
    executor, _ = await tolerant(await pool.bus("scheduler"))
    await carry_out(executor, Batch(records=((in_state(JobState.STOPPED, num_items=1), (item(1),)),)))
    assert executor.num_unpublished == 1
    await executor.remove("job-1")
    assert executor.num_unpublished == 0


async def test_the_history_of_a_refused_job_is_stored_whole_with_its_end_and_nothing_before(pool: Pool) -> None:
    """It has to end, since nobody would know of what it did: only that is stored once the bus takes records again."""
    bus = await pool.bus("scheduler")
    executor, refused = await tolerant(bus)
    await limit_records(bus, max_bytes=10)
    for number in (1, 2):
        await carry_out(executor, Batch(records=((in_state(JobState.QUEUED, num_items=number), (item(number),)),)))
    assert refused == ["job-1"], "it is said once"
    await limit_records(bus, max_bytes=-1)
    await carry_out(executor, Batch(retries=True))
    assert await stored_record(bus) is None, "it has not ended"
    assert executor.is_refused("job-1")
    ended = in_state(JobState.FAILED, num_items=3)
    await carry_out(executor, Batch(records=((ended, (item(3, "failed", slots=("host-1/0",)),)),)))
    stored = await stored_record(bus)
    assert stored is not None
    assert stored.value.state is JobState.FAILED
    assert [(each.number, each.slots) for each in stored.value.unpublished] == [(1, ()), (2, ()), (3, ())]
    assert not executor.is_refused("job-1")


async def test_an_end_that_was_stored_late_is_stored_once(pool: Pool) -> None:
    bus = await pool.bus("scheduler")
    executor, _ = await tolerant(bus)
    await limit_records(bus, max_bytes=10)
    await carry_out(executor, Batch(records=((in_state(JobState.STOPPED, num_items=1), (item(1, "stopped"),)),)))
    await limit_records(bus, max_bytes=-1)
    await carry_out(executor, Batch(retries=True))
    stored = await stored_record(bus)
    assert stored is not None
    await carry_out(executor, Batch(retries=True))
    assert await stored_record(bus) == stored


@pytest.mark.parametrize("limit", ["MAX_UNPUBLISHED", "MAX_UNPUBLISHED_BYTES"])
async def test_a_record_never_holds_more_of_a_history_than_it_has_room_for(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """What has no room is published first; if the bus takes neither, the job ends."""
    maximum = 3 if limit == "MAX_UNPUBLISHED" else 3 * 6 * 100
    monkeypatch.setattr(resile_scheduler.executor, limit, maximum)
    bus = await pool.bus("scheduler")
    executor, refused = await tolerant(bus)
    lengths = []
    for number in range(1, 8):
        items = (item(number, reason="x" * 100),)
        await carry_out(executor, Batch(records=((in_state(JobState.QUEUED, num_items=number), items),)))
        stored = await stored_record(bus)
        assert stored is not None
        lengths.append(len(stored.value.unpublished))
    assert lengths == [1, 2, 3, 1, 2, 3, 1]
    await limit_events(bus, max_bytes=10)
    for number in (8, 9, 10):
        items = (item(number, reason="x" * 100),)
        await carry_out(executor, Batch(records=((in_state(JobState.QUEUED, num_items=number), items),)))
    assert refused == ["job-1"]
    stored = await stored_record(bus)
    assert stored is not None
    assert [each.number for each in stored.value.unpublished] == [7, 8, 9]
