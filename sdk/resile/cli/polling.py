"""Polling a pool, with patience for outages."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from ..http_requests import PATIENCE_SECONDS, Refused, Unreachable, is_outage

POLL_SECONDS = 0.5

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
