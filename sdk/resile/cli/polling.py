"""Looking at a pool again and again, and bearing with it while it is away."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from ..client import PATIENCE_SECONDS, Client, Refused, Unreachable

POLL_SECONDS = 0.5

T = TypeVar("T")


async def looks(look: Callable[[], Awaitable[T]]) -> AsyncIterator[T]:
    """Return what ``look`` sees, twice a second. Raises what it raises, a pool that is away only after a minute."""
    heard = time.monotonic()
    while True:
        try:
            seen = await look()
        except (Unreachable, Refused) as error:
            is_away = isinstance(error, Unreachable) or error.status >= 500
            if not is_away or time.monotonic() - heard > PATIENCE_SECONDS:
                raise
        else:
            heard = time.monotonic()
            yield seen
        await asyncio.sleep(POLL_SECONDS)


async def until_over(client: Client, job: str) -> None:
    """Return when the job has completed, failed or was stopped."""
    async for view in looks(lambda: client.job(job)):
        if view.state.is_final:
            return
