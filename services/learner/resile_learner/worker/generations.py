"""The generations that peers may name in a handshake, as one worker knows them from its orders."""

import asyncio
from typing import NamedTuple

from ..messages import Order

MAX_KEPT = 16
"""At most this many orders count. A worker further behind is dropped by one of them, which its agent sends it."""


class Credentials(NamedTuple):
    """What a handshake for one generation is checked against."""

    secret: str
    workers: frozenset[int]


class Generations:
    """The credentials of the newest orders. They alone are kept, whatever peers ask for."""

    def __init__(self) -> None:
        self._credentials: dict[int, Credentials] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._credentials)

    def add(self, order: Order) -> None:
        """Let the workers of ``order`` prove that they belong to it."""
        self._credentials.setdefault(order.generation, Credentials(order.secret, frozenset(order.workers)))
        while len(self._credentials) > MAX_KEPT:
            del self._credentials[min(self._credentials)]
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for(self, generation: int) -> Credentials:
        """Return the credentials of ``generation`` once its order has arrived; wait forever if it never does."""
        while generation not in self._credentials:
            await self._changed.wait()
        return self._credentials[generation]
