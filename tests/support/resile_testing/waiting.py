"""Waiting for a condition that another task or process fulfils."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 200.0
"""Seconds that tests wait for what must happen: enough for a busy machine. Only a test that fails waits this long."""


async def until(condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Return when ``condition`` holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.01)


def block_until(condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Return when ``condition`` holds, while the event loop does not run. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
