"""Virtual time: order, timers, crashes without clean-up, and freezes that lose nothing."""

import asyncio

from .loop import Process, SimLoop


def test_time_jumps_to_the_next_timer_and_timeouts_work() -> None:
    loop, seen = SimLoop(), []

    async def work() -> None:
        await asyncio.sleep(3600)
        seen.append(loop.time())
        try:
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append(loop.time())

    process = Process(loop, "p")
    task = process.spawn(work())
    assert loop.run_until(task.done, limit=10_000)
    assert seen == [3600, 3605]


def test_a_crashed_process_runs_nothing_more_not_even_its_clean_up() -> None:
    loop, seen = SimLoop(), []

    async def work() -> None:
        try:
            while True:
                await asyncio.sleep(1)
                seen.append(loop.time())
        finally:
            seen.append("clean-up")

    process = Process(loop, "p")
    task = process.spawn(work())
    loop.call_later(2.5, process.crash)
    loop.call_later(10, seen.append, "end")
    loop.run_until(lambda: "end" in seen, limit=20)
    assert seen == [1, 2, "end"]
    assert not task.done()


def test_a_frozen_process_goes_on_where_it_was() -> None:
    loop, seen = SimLoop(), []

    async def work() -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append(loop.time())

    process = Process(loop, "p")
    task = process.spawn(work())
    loop.call_later(1.5, process.freeze)
    loop.call_later(7, process.thaw)
    assert loop.run_until(task.done, limit=20)
    assert seen == [1, 7, 8]
