"""Publishes messages in order and drops none: they wait while NATS is disconnected, and facts also on disk.

What the `Spool` holds when an agent starts was reported by workers of an earlier one. It may have been published
already: a message keeps its id, so that it takes effect once.
"""

import asyncio
import logging
import secrets
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.context import Context, get_current
from pydantic import ValidationError

from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.connection import BusClosed
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import HostHello
from resile_shared.messages.message import Message
from resile_shared.messages.reports import CheckpointSaved, Progress, Report, Warned
from resile_shared.telemetry.traces import resumed

logger = logging.getLogger(__name__)


class Spooled(Message):
    """A report, and the id under which it is published."""

    id: str
    report: Report


@dataclass
class Spool:
    """Keeps reports that are not published yet in the file ``path``: one a line, and no file once all are out.

    It survives the end of the agent, but not of the machine: it is never synced.
    """

    path: Path
    is_empty: bool = True
    ends_torn: bool = False
    """Whether the last line may be incomplete."""

    def read(self) -> list[Spooled]:
        """Return what an earlier agent left, in order; the last line may be incomplete."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        lines = content.splitlines()
        found = []
        for line in lines:
            try:
                found.append(Spooled.model_validate_json(line))
            except ValidationError:
                logger.warning("%s: skipped a line of %s bytes that cannot be read", self.path, len(line))
        self.is_empty, self.ends_torn = not lines, not content.endswith(b"\n")
        return found

    def add(self, spooled: Spooled) -> None:
        """Append a report. If the disk is full, the report just does not survive the agent."""
        line = spooled.model_dump_json().encode() + b"\n"
        try:
            with self.path.open("ab") as file:
                file.write(b"\n" + line if self.ends_torn else line)
            self.is_empty = self.ends_torn = False
        except OSError as error:
            self.ends_torn = True
            logger.warning("%s: a report is kept in memory only: %s", self.path, error.strerror)

    def clear(self) -> None:
        """Remove all reports: they are published."""
        if not self.is_empty:
            self.path.unlink(missing_ok=True)
            self.is_empty, self.ends_torn = True, False


@dataclass(frozen=True)
class _Message:
    id: str
    content: HostHello | Report
    context: Context = field(default_factory=get_current)
    """The trace that it belongs to."""


class ReportQueue:
    """Publishes messages one after the other, first those that an earlier agent left in ``spool``.

    While progress waits, only the newest is kept; what is repeated waits once.
    """

    def __init__(self, bus: Bus, spool: Spool) -> None:
        self._bus = bus
        self._spool = spool
        self._waiting: deque[_Message] = deque(_Message(left.id, left.report) for left in spool.read())
        self._changed = asyncio.Event()
        self._changed.set()

    @property
    def num_facts(self) -> int:
        """How many reports wait that nothing replaces, those of an earlier agent included."""
        return sum(isinstance(m.content, Report) and not _is_replaceable(m.content) for m in self._waiting)

    def put(self, content: HostHello | Report) -> None:
        """Queue a message."""
        if isinstance(content, Report):
            if self._is_repeated(content):
                return
            self._drop_old_progress(content)
        elif any(message.content == content for message in self._waiting):
            return
        message = _Message(secrets.token_hex(16), content)
        if isinstance(content, Report) and not _is_replaceable(content):
            self._spool.add(Spooled(id=message.id, report=content))
        self._waiting.append(message)
        self._changed.set()

    def _is_repeated(self, new: Report) -> bool:
        """Whether the same waits already: workers repeat a warning, and that training is paused."""
        if not isinstance(new.content, CheckpointSaved | Warned):
            return False
        waiting = (message.content for message in self._waiting)
        return any(isinstance(old, Report) and (old.job, old.content) == (new.job, new.content) for old in waiting)

    def _drop_old_progress(self, new: Report) -> None:
        """Drop progress of the same job that ``new`` directly follows and replaces."""
        for message in reversed(self._waiting):
            old = message.content
            if isinstance(old, Report) and old.job == new.job:
                if _is_replaceable(old) and isinstance(new.content, Progress):
                    self._waiting.remove(message)
                return

    async def publish(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.flush()

    async def flush(self) -> None:
        """Publish everything queued. A message in flight when this is cancelled is published again by the next call."""
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
        self._spool.clear()


def _is_replaceable(report: Report) -> bool:
    """Whether newer progress replaces it; the end of an epoch is never replaced."""
    return isinstance(report.content, Progress) and not report.content.ends_epoch


def _subject(message: HostHello | Report) -> str:
    if isinstance(message, HostHello):
        return subjects.host_event(message.host, "hello")
    return subjects.report(message.job, message.content.kind)
