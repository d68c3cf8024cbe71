"""Polling a pool, with patience for outages."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from ..client import AsyncClient
from ..http_requests import PATIENCE_SECONDS, Refused, Unreachable, is_outage

POLL_SECONDS = 0.5
QUIET_SECONDS = 1.0
"""After the end of a job, the last events are stored and sent within this time of each other."""

T = TypeVar("T")


async def poll(fetch: Callable[[], Awaitable[T]]) -> AsyncIterator[T]:
    """Yield the result of ``fetch`` twice a second. Raises its errors; an unreachable pool only after a minute."""
    last_success = time.monotonic()
    while True:
        try:
            result = await fetch()
        except (Unreachable, Refused) as error:
            if not is_outage(error) or time.monotonic() - last_success > PATIENCE_SECONDS:
                raise
        else:
            last_success = time.monotonic()
            yield result
        await asyncio.sleep(POLL_SECONDS)


async def until_over(client: AsyncClient, job: str) -> None:
    """Return when the job has completed, failed or been stopped."""
    async for view in poll(lambda: client.job(job)):
        if view.state.is_final:
            return


async def until_quiet(client: AsyncClient, job: str, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield ``items``, which never end, until the job has ended and no more come. Raises errors of both."""
    over = asyncio.ensure_future(until_over(client, job))
    upcoming: asyncio.Future[T] | None = None
    try:
        while True:
            upcoming = asyncio.ensure_future(anext(items))
            await asyncio.wait({upcoming, over}, return_when=asyncio.FIRST_COMPLETED)
            if not upcoming.done():
                over.result()
                await asyncio.wait({upcoming}, timeout=QUIET_SECONDS)
            if not upcoming.done():
                return
            yield upcoming.result()
    finally:
        tasks: list[asyncio.Future[Any]] = [over] if upcoming is None else [over, upcoming]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
