"""Looking at a stream: its newest messages, and what follows a place."""

import asyncio
from contextlib import aclosing

import pytest

from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.stream_reader import StreamReader
from resile_shared.bus.subjects import EVENTS
from resile_shared.messages.hosts import HostHello
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS

from .examples import hello


async def publish(bus: Bus, host: str, incarnation: int) -> None:
    await bus.publish(subjects.host_event(host, "hello"), hello(incarnation, host))


def of(bus: Bus, host: str) -> StreamReader[HostHello]:
    return bus.read_stream(EVENTS, HostHello, subject=subjects.host_event(host, "hello"))


@pytest.mark.parametrize("num", [0, 1, 3, 100])
async def test_the_newest_messages_are_found_however_far_back_they_are(pool: Pool, num: int) -> None:
    registry, learner = await pool.bus("registry"), await pool.bus("learner")
    for incarnation in range(1, 6):
        await publish(learner, "rare", incarnation)
    for incarnation in range(1, 200):
        await publish(learner, "busy", incarnation)
    tail = await of(registry, "rare").tail(num)
    assert [received.message.incarnation for received in tail.messages] == list(range(1, 6))[5 - min(num, 5) :]
    assert tail.last == 204
    assert [m.sequence for m in (await of(registry, "busy").tail(num)).messages] == list(
        range(205 - min(num, 199), 205)
    )


async def test_no_more_than_so_many_bytes_are_read_but_at_least_the_newest_message(pool: Pool) -> None:
    registry, learner = await pool.bus("registry"), await pool.bus("learner")
    for incarnation in range(1, 301):  # more than one page
        await publish(learner, "a", incarnation)
    reader = of(registry, "a")
    num_bytes = len(hello(100, "a").model_dump_json())
    tail = await reader.tail(250, max_bytes=3 * num_bytes)
    assert ([received.message.incarnation for received in tail.messages], tail.is_cut) == ([298, 299, 300], True)
    tail = await reader.tail(250, max_bytes=1)
    assert ([received.message.incarnation for received in tail.messages], tail.is_cut) == ([300], True)
    assert not (await reader.tail(3, max_bytes=3 * num_bytes)).is_cut


async def test_a_stream_without_messages_has_no_newest(pool: Pool) -> None:
    registry = await pool.bus("registry")
    tail = await of(registry, "none").tail(10)
    assert (tail.messages, tail.last, await of(registry, "none").last()) == ((), 0, 0)


async def test_what_follows_the_tail_has_no_gap_and_what_cannot_be_read_is_left_out(pool: Pool) -> None:
    registry, learner = await pool.bus("registry"), await pool.bus("learner")
    await publish(learner, "a", 1)
    tail = await of(registry, "a").tail(10)
    await learner.connection.send(subjects.host_event("a", "hello"), b"garbage", headers={})
    await publish(learner, "a", 2)
    await pool.crash()
    await publish(learner, "a", 3)
    seen: list[Received[HostHello]] = list(tail.messages)
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for received in of(registry, "a").follow(after=tail.last):
            seen.append(received)
            if len(seen) == 3:
                break
    assert [received.message.incarnation for received in seen] == [1, 2, 3]
    assert [received.sequence for received in seen] == [1, 3, 4]
    assert all(received.stored is not None for received in seen)


async def test_a_reader_goes_on_with_what_is_new_after_an_older_store_was_restored(pool: Pool) -> None:
    registry, learner = await pool.bus("registry"), await pool.bus("learner")
    await publish(learner, "a", 1)
    await pool.back_up()
    for incarnation in range(2, 6):
        await publish(learner, "a", incarnation)
    async with asyncio.timeout(PATIENCE_SECONDS), aclosing(of(registry, "a").follow(after=0)) as messages:
        seen = [(await anext(messages)).message.incarnation for _ in range(5)]
        await pool.restore()
        await publish(learner, "b", 1)
        for incarnation in (6, 7):
            await publish(learner, "a", incarnation)
        after = [await anext(messages) for _ in range(2)]
    assert seen == [1, 2, 3, 4, 5]
    assert [(received.message.incarnation, received.sequence) for received in after] == [(6, 3), (7, 4)]
    caught_up = asyncio.Event()
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        aclosing(of(registry, "a").follow(after=9, caught_up=caught_up)) as messages,
    ):
        upcoming = asyncio.create_task(anext(messages))
        await caught_up.wait()
        await publish(learner, "a", 8)
        assert (await upcoming).message.incarnation == 8


async def test_a_follower_knows_when_it_has_what_was_stored_before(pool: Pool) -> None:
    registry, learner = await pool.bus("registry"), await pool.bus("learner")
    for host in ("a", "a", "b"):
        await publish(learner, host, 1)
    seen: list[str] = []

    async def read(received: Received[HostHello]) -> None:
        seen.append(received.message.host)

    for start, wanted in (("all", ["a", "a", "b"]), ("last_per_subject", ["a", "b"]), ("new", [])):
        seen.clear()
        caught_up = asyncio.Event()
        following = asyncio.create_task(
            registry.follow(
                EVENTS, HostHello, read, subjects=("resile.host.*.hello",), start=start, caught_up=caught_up
            )
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            await caught_up.wait()
        assert seen == wanted
        following.cancel()
        await asyncio.wait({following})
