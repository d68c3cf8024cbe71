"""Waiting for a condition that another task or process fulfils."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], *, seconds: float = 30.0) -> None:
    """Return when ``condition`` holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.01)


def block_until(condition: Callable[[], object], *, seconds: float = 30.0) -> None:
    """Return when ``condition`` holds, while the event loop does not run. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
