"""What must be told in order and is never dropped: it waits here while the bus is away."""

import asyncio
import logging
from collections import deque

from resile_shared import subjects
from resile_shared.bus import Bus
from resile_shared.connection import BusClosed
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import HostHello
from resile_shared.messages.reports import Progress, Report

logger = logging.getLogger(__name__)


class Outgoing:
    """Publishes messages one after the other. Of progress that waits only the newest is kept."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: deque[HostHello | Report] = deque()
        self._changed = asyncio.Event()

    def put(self, message: HostHello | Report) -> None:
        """Have a message published after all that were put before."""
        if isinstance(message, Report):
            self._drop_old_progress(message)
        elif message in self._waiting:
            return
        self._waiting.append(message)
        self._changed.set()

    def _drop_old_progress(self, new: Report) -> None:
        """Drop the progress of a job that ``new`` follows at once and makes stale; the end of an epoch never is."""
        newest = next((old for old in reversed(self._waiting) if isinstance(old, Report) and old.job == new.job), None)
        if newest is None or not (isinstance(new.content, Progress) and isinstance(newest.content, Progress)):
            return
        if not newest.content.ends_epoch:
            self._waiting.remove(newest)

    async def publish(self) -> None:
        """Publish for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting:
                message = self._waiting.popleft()
                try:
                    await self._bus.publish(_subject(message), message)
                except BusClosed:
                    raise
                except ResileError as error:
                    logger.error("dropped: %s", error)


def _subject(message: HostHello | Report) -> str:
    if isinstance(message, HostHello):
        return subjects.host_event(message.host, "hello")
    return subjects.report(message.job, message.content.kind)
