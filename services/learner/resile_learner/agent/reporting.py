"""What must be told in order and is never dropped: it waits here while the bus is away."""

import asyncio
import logging
import secrets
from collections import deque
from dataclasses import dataclass, field

from opentelemetry.context import Context, get_current

from resile_shared import subjects
from resile_shared.bus import Bus
from resile_shared.connection import BusClosed
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import HostHello
from resile_shared.messages.reports import Progress, Report
from resile_shared.telemetry import resumed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Message:
    id: str
    content: HostHello | Report
    context: Context = field(default_factory=get_current)
    """The trace that it is part of."""


class Outgoing:
    """Publishes messages one after the other. Of progress that waits only the newest is kept."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: deque[_Message] = deque()
        self._changed = asyncio.Event()

    def put(self, content: HostHello | Report) -> None:
        """Have a message published after all that were put before."""
        if isinstance(content, Report):
            self._drop_old_progress(content)
        elif any(message.content == content for message in self._waiting):
            return
        self._waiting.append(_Message(secrets.token_hex(16), content))
        self._changed.set()

    def _drop_old_progress(self, new: Report) -> None:
        """Drop the progress of a job that ``new`` follows at once and makes stale; the end of an epoch never is."""
        for message in reversed(self._waiting):
            old = message.content
            if isinstance(old, Report) and old.job == new.job:
                is_stale = isinstance(old.content, Progress) and not old.content.ends_epoch
                if is_stale and isinstance(new.content, Progress):
                    self._waiting.remove(message)
                return

    async def publish(self) -> None:
        """Publish for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.flush()

    async def flush(self) -> None:
        """Publish all that waits. What is under way when this is cancelled is published again by the next call."""
        while self._waiting:
            message = self._waiting[0]
            try:
                with resumed(message.context):
                    await self._bus.publish(_subject(message.content), message.content, message_id=message.id)
            except BusClosed:
                raise
            except ResileError as error:
                logger.error("dropped: %s", error)
            if self._waiting and self._waiting[0] is message:
                self._waiting.popleft()


def _subject(message: HostHello | Report) -> str:
    if isinstance(message, HostHello):
        return subjects.host_event(message.host, "hello")
    return subjects.report(message.job, message.content.kind)
