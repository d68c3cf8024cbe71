"""The scheduler's lease, on a real bus."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from resile_scheduler.lease import LeadershipLost, Lease, _Standby
from resile_shared.bus.buckets import Bucket, Entry
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


async def test_a_lease_is_trusted_from_the_beginning_of_its_renewal(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby counts from the moment at which it is stored; the answer may come much later."""
    now, update = 0.0, Bucket.update

    async def update_slowly(*args: Any, **options: Any) -> int:
        nonlocal now
        revision = await update(*args, **options)
        now += 9.0
        return revision

    monkeypatch.setattr(Bucket, "update", update_slowly)
    bucket = await leases(pool)
    leader = Lease(bucket, holder="leader", seconds=10.0, clock=lambda: now)
    await leader.acquire()
    now = 10.0
    await leader.confirm()
    renewed = await bucket.get(LEASE_KEY)
    now += 0.9
    await leader.confirm()
    assert await bucket.get(LEASE_KEY) == renewed
    now += 0.1
    await leader.confirm()
    assert await bucket.get(LEASE_KEY) != renewed


def test_a_standby_counts_only_the_time_in_which_it_could_look() -> None:
    standby = _Standby(patience=8.0)
    entry = Entry(LEASE_KEY, Record(epoch=1, holder="leader", counter=3), revision=7)

    def first_moment(begin: int) -> int:
        return next(now for now in range(begin, begin + 20) if standby.may_take(entry, begun=now, now=now))

    for now in range(4):
        assert not standby.may_take(entry, begun=now, now=now)
    assert first_moment(100) == 108
    assert first_moment(109) == 109, "it looks all the time"


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
