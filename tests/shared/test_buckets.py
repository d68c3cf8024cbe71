import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from nats.aio.msg import Msg

from resile_shared.bus.buckets import Change, ConflictError, Entry, FencedError, UnreadableError
from resile_shared.bus.subjects import JOBS, LEASE, InvalidSubject
from resile_shared.messages.pool import Lease
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS

from .examples import record


def lease(counter: int) -> Lease:
    return Lease(epoch=1, holder="a", counter=counter)


async def test_only_who_has_seen_the_newest_value_changes_it(pool: Pool) -> None:
    leases = (await pool.bus("scheduler")).bucket(LEASE)
    assert await leases.get("scheduler") is None
    first = await leases.create("scheduler", lease(0))
    with pytest.raises(ConflictError):
        await leases.create("scheduler", lease(1))
    second = await leases.update("scheduler", lease(1), revision=first)
    with pytest.raises(ConflictError, match="lease/scheduler is no longer at revision 1"):
        await leases.update("scheduler", lease(2), revision=first)
    assert await leases.get("scheduler") == Entry("scheduler", lease(1), second)


async def test_a_write_that_arrives_twice_is_no_conflict_with_itself(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await pool.bus("scheduler")
    request = bus.connection.request

    async def lose_the_first_answer(subject: str, body: bytes, **options: Any) -> Msg:
        await request(subject, body, **options)
        return await request(subject, body, **options)

    monkeypatch.setattr(bus.connection, "request", lose_the_first_answer)
    leases = bus.bucket(LEASE)
    first = await leases.create("scheduler", lease(0))
    second = await leases.update("scheduler", lease(1), revision=first)
    with pytest.raises(ConflictError):
        await leases.update("scheduler", lease(2), revision=first)
    await leases.delete("scheduler", revision=second)
    assert await leases.get("scheduler") is None


async def test_a_new_writer_fences_off_the_earlier_ones_and_readers_do_not_see_it(pool: Pool) -> None:
    bucket = (await pool.bus("scheduler")).bucket(LEASE)
    old = await bucket.take_over(1)
    await bucket.put("a", lease(0), fence=old)
    new = await bucket.take_over(3)
    for late in (
        bucket.put("a", lease(1), fence=old),
        bucket.put("b", lease(1), fence=old),
        bucket.remove("a", fence=old),
    ):
        with pytest.raises(FencedError, match="later than 1 has taken over lease"):
            await late
    with pytest.raises(FencedError):
        await bucket.take_over(2)
    entries = await bucket.entries()
    assert {key: entry.value for key, entry in entries.items()} == {"a": lease(0)}
    await bucket.put("b", lease(2), fence=new)
    await bucket.remove("a", fence=new)
    assert await bucket.keys() == ["b"]


async def test_a_deleted_key_can_be_created_again(pool: Pool) -> None:
    leases = (await pool.bus("scheduler")).bucket(LEASE)
    revision = await leases.create("scheduler", lease(0))
    with pytest.raises(ConflictError):
        await leases.delete("scheduler", revision=revision + 1)
    await leases.delete("scheduler", revision=revision)
    assert await leases.get("scheduler") is None
    assert await leases.keys() == []
    await leases.create("scheduler", lease(1))
    assert await leases.keys() == ["scheduler"]


async def test_a_watch_gives_the_present_first_and_then_changes(pool: Pool) -> None:
    leases = (await pool.bus("scheduler")).bucket(LEASE)
    a = await leases.create("a", lease(0))
    b = await leases.create("b", lease(0))
    await leases.delete("b", revision=b)
    a = await leases.update("a", lease(1), revision=a)
    async with aclosing(leases.watch()) as changes, asyncio.timeout(PATIENCE_SECONDS):
        present = await anext(changes)
        assert {change.key: change.value for change in present} == {"a": lease(1), "b": None}
        await leases.delete("a", revision=a)
        assert await anext(changes) == (Change("a", None, a + 1),)


async def test_a_watch_of_an_empty_bucket_says_so(pool: Pool) -> None:
    leases = (await pool.bus("scheduler")).bucket(LEASE)
    async with aclosing(leases.watch()) as changes, asyncio.timeout(PATIENCE_SECONDS):
        assert await anext(changes) == ()


async def test_a_watch_survives_crashes_and_misses_nothing(pool: Pool) -> None:
    leases = (await pool.bus("scheduler")).bucket(LEASE)
    seen: dict[str, int] = {}

    async def watch() -> None:
        async with aclosing(leases.watch()) as batches:
            async for changes in batches:
                for change in changes:
                    assert change.value is not None
                    assert seen.get(change.key, -1) < change.value.counter
                    seen[change.key] = change.value.counter

    watching = asyncio.create_task(watch())
    revisions = {key: await leases.create(key, lease(0)) for key in ("a", "b", "c")}
    async with asyncio.timeout(PATIENCE_SECONDS):
        for counter in range(1, 5):
            await pool.crash()
            for key in revisions:
                revisions[key] = await leases.update(key, lease(counter), revision=revisions[key])
        while seen != dict.fromkeys(revisions, 4):
            assert not watching.done()
            await asyncio.sleep(0.01)
    watching.cancel()


async def test_a_value_that_cannot_be_read_hides_no_other(pool: Pool) -> None:
    scheduler = await pool.bus("scheduler")
    jobs = scheduler.bucket(JOBS)
    await scheduler.connection.request_store("$KV.jobs.broken", b"not JSON")
    await jobs.create("job-1", record())
    assert await jobs.keys() == ["job-1"]
    with pytest.raises(UnreadableError, match="jobs/broken is invalid"):
        await jobs.get("broken")


async def test_keys_are_ids(pool: Pool) -> None:
    leases = (await pool.bus("scheduler")).bucket(LEASE)
    for key in ("", "a.b", "*", "a b"):
        with pytest.raises(InvalidSubject):
            await leases.create(key, lease(0))
