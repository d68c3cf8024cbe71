"""Waiting for what another task or process brings about."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], *, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.01)
