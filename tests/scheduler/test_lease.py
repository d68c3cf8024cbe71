"""The scheduler's lease, on a real bus."""

import asyncio
from contextlib import aclosing

import pytest

from resile_scheduler.lease import LeadershipLost, Lease
from resile_shared.bus.buckets import Bucket
from resile_shared.bus.subjects import LEASE, LEASE_KEY
from resile_shared.messages.pool import Lease as Record
from resile_testing.fixtures import Pool


async def leases(pool: Pool) -> Bucket[Record]:
    return (await pool.bus("scheduler")).bucket(LEASE)


def lease(bucket: Bucket[Record], holder: str, *, seconds: float = 0.5) -> Lease:
    return Lease(bucket, holder=holder, seconds=seconds)


async def test_each_holder_has_a_higher_epoch_and_the_one_before_is_deposed(pool: Pool) -> None:
    bucket = await leases(pool)
    first, second = lease(bucket, "first"), lease(bucket, "second")
    await first.acquire()
    await second.acquire()
    assert (first.epoch, second.epoch) == (1, 2)
    await second.confirm()
    with pytest.raises(LeadershipLost, match="epoch 1"):
        await first.keep()


async def test_a_lease_that_is_held_is_not_taken(pool: Pool) -> None:
    bucket = await leases(pool)
    first, second = lease(bucket, "first", seconds=2.0), lease(bucket, "second", seconds=2.0)
    await first.acquire()
    holding = asyncio.create_task(first.keep())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4.0):
            await second.acquire()
    assert not holding.done()
    holding.cancel()


async def test_a_released_lease_is_taken_at_once_and_its_epoch_rises(pool: Pool) -> None:
    bucket = await leases(pool)
    first, second = lease(bucket, "first", seconds=600.0), lease(bucket, "second", seconds=600.0)
    await first.acquire()
    await first.release()
    await second.acquire()
    assert second.epoch == 2
    await first.release()  # too late to have an effect
    entry = await bucket.get(LEASE_KEY)
    assert entry is not None
    assert (entry.value.holder, entry.value.is_released) == ("second", False)


async def test_who_did_not_renew_in_time_looks_before_it_acts(pool: Pool) -> None:
    bucket = await leases(pool)
    first, second = lease(bucket, "first"), lease(bucket, "second")
    await first.acquire()
    before = await bucket.get(LEASE_KEY)
    await first.confirm()
    assert await bucket.get(LEASE_KEY) == before
    await second.acquire()
    with pytest.raises(LeadershipLost):
        await first.confirm()


async def test_a_disconnected_bus_does_not_count_as_silence(pool: Pool) -> None:
    bucket = await leases(pool)
    first, second = lease(bucket, "first", seconds=2.0), lease(bucket, "second", seconds=2.0)
    await first.acquire()
    taking = asyncio.create_task(second.acquire())
    holding = asyncio.create_task(first.keep())
    await pool.kill()
    await asyncio.sleep(2.5)  # longer than a standby waits
    await pool.server.start()
    done, _ = await asyncio.wait({taking, holding}, timeout=1.0)
    assert not done
    taking.cancel()
    holding.cancel()


async def test_the_next_leader_knows_how_far_the_reports_were_read(pool: Pool) -> None:
    bucket = await leases(pool)
    first, second, third = (lease(bucket, name) for name in ("first", "second", "third"))
    await first.acquire()
    first.position = 7
    holding = asyncio.create_task(first.keep())
    async with aclosing(bucket.watch(LEASE_KEY)) as changes:
        async for batch in changes:
            if any(change.value and change.value.position == 7 for change in batch):
                break
    holding.cancel()
    await second.acquire()
    assert second.position == 7
    second.position = 9
    await second.release()
    await third.acquire()
    assert third.position == 9
