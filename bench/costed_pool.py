"""What changes of jobs on a pool store in the bus: for each message that is stored, somebody waits for the disk.

A pool of two hosts of two slots, and jobs of up to four workers. What is stored every so often (the scheduler's lease,
progress, logs, curves) is left out: its number depends on how long things take.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from jobs import pool_up, submit
from stamps import Stamps

from resile.chaos.processes import PoolProcesses
from resile.client import AsyncClient
from resile.pool.services import PoolOptions
from resile_shared.bus.connection import Connection
from resile_shared.bus.credentials import read_credentials
from resile_shared.bus.subjects import ALLOCATIONS, EVENTS, JOBS, REPORTS

WORKERS = 4
STORED = {
    REPORTS.name: "stored reports",
    EVENTS.name: "stored events",
    JOBS.stream: "stored job records",
    ALLOCATIONS.stream: "stored allocations",
}
"""The streams whose messages are counted, and what they are called in the table."""
CALM_SECONDS = 1.0
"""After so long without a message that is stored, a change is over."""
POLL_SECONDS = 0.1
PATIENCE_SECONDS = 120.0


async def pool_costs(folder: Path) -> dict[str, Mapping[str, float]]:
    """By event, the number of messages that were stored, by stream."""
    home, stamps = folder / "pool", Stamps(folder / "stamps")
    async with asyncio.timeout(PATIENCE_SECONDS), pool_up(home, PoolOptions(hosts=2, slots=WORKERS // 2)) as client:
        bus = await Connection.open(read_credentials(home / "bus/credentials/scheduler.json"), name="bench")
        try:
            return await _CountedPool(client, bus, stamps).costs()
        finally:
            await bus.close()


class _CountedPool:
    def __init__(self, client: AsyncClient, bus: Connection, stamps: Stamps) -> None:
        self._client = client
        self._bus = bus
        self._stamps = stamps
        self._first = ""

    async def costs(self) -> dict[str, Mapping[str, float]]:
        await self._calm()
        return {
            "a submission": await self._cost(self._submit_first, first=4),
            "a second job": await self._cost(lambda: self._submit("second"), first=2, second=2),
            "the second job is stopped": await self._cost(self._stop_second, first=4),
            "a worker is killed": await self._cost(self._kill, first=4, is_of_other_members=True),
        }

    async def _submit(self, name: str) -> str:
        return await submit(self._client, self._stamps, name=name, max_workers=WORKERS)

    async def _submit_first(self) -> None:
        self._first = await self._submit("first")

    async def _stop_second(self) -> None:
        await self._client.stop(await self._client.find("second"))

    async def _kill(self) -> None:
        newest = PoolProcesses(os.getpid()).workers(self._first)[-1]
        os.kill(newest.pid, signal.SIGKILL)

    async def _cost(
        self, cause: Callable[[], Awaitable[object]], *, is_of_other_members: bool = False, **workers: int
    ) -> Mapping[str, float]:
        """What is stored from ``cause`` until jobs train with so many ``workers`` and nothing more is stored.

        ``is_of_other_members``: the first job has as many workers before, but not the same.
        """
        before = await self._stored()
        generation = await self._generation() if is_of_other_members else -1
        await cause()
        while not (await self._trains(workers) and await self._generation() > generation):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)  # the pool is other processes
        counts = Counter(await self._calm())
        counts.subtract(before)
        return {STORED[stream]: counts[stream] for stream in STORED}

    async def _trains(self, workers: Mapping[str, int]) -> bool:
        jobs = {job.name: job for job in await self._client.jobs()}
        return all(jobs[name].workers == number for name, number in workers.items())

    async def _generation(self) -> int:
        return (await self._client.job(self._first)).generation

    async def _calm(self) -> dict[str, int]:
        """Wait until nothing is stored any more; return how many messages each stream has ever had."""
        stored, since = await self._stored(), time.monotonic()
        while time.monotonic() - since < CALM_SECONDS:
            await asyncio.sleep(POLL_SECONDS)
            if (now := await self._stored()) != stored:
                stored, since = now, time.monotonic()
        return stored

    async def _stored(self) -> dict[str, int]:
        answers = [await self._bus.request_store(f"$JS.API.STREAM.INFO.{stream}", b"") for stream in STORED]
        return {stream: answer["state"]["last_seq"] for stream, answer in zip(STORED, answers, strict=True)}
