"""Publishes messages in order: they wait while NATS is disconnected, and facts also on disk.

Messages are dropped only if a worker reports too much.

What the `Spool` holds when an agent starts was reported by workers of an earlier one. It may have been published
already: a message keeps its id, so that it takes effect once.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.context import Context, get_current
from pydantic import ValidationError

from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.connection import BusClosed
from resile_shared.bus.credentials import write_private
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import HostHello
from resile_shared.messages.message import Message
from resile_shared.messages.reports import CheckpointSaved, Progress, Report, Warned
from resile_shared.telemetry.traces import resumed

logger = logging.getLogger(__name__)

MAX_WAITING = 200


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
    num_added: int = 0
    """Number of reports added since the file was opened, replaced or cleared."""
    is_empty: bool = True
    ends_torn: bool = False
    """Whether the last line of the file may be incomplete."""

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
            self.num_added += 1
        except OSError as error:
            self.ends_torn = True
            logger.warning("%s: a report is kept in memory only: %s", self.path, error.strerror)

    def replace(self, reports: Sequence[Spooled]) -> None:
        """Keep only ``reports``. If the disk is full, all others are kept, too."""
        self.num_added = 0
        try:
            write_private(self.path, b"".join(report.model_dump_json().encode() + b"\n" for report in reports))
            self.is_empty, self.ends_torn = not reports, False
        except ResileError as error:
            logger.warning("reports that are published are not removed yet: %s", error)

    def clear(self) -> None:
        """Remove all reports: they are published."""
        if not self.is_empty:
            self.path.unlink(missing_ok=True)
            self.is_empty, self.ends_torn = True, False
            self.num_added = 0


@dataclass(frozen=True)
class _Message:
    id: str
    content: HostHello | Report
    context: Context = field(default_factory=get_current)
    """The trace that the message belongs to."""


_Group = tuple[str, int, str]
"""Job, worker, and kind of the reports of a group."""


class _Waiting:
    """Messages in their order, with at most `MAX_WAITING` facts of each kind and worker: the oldest are dropped."""

    def __init__(self) -> None:
        self._messages: OrderedDict[str, _Message] = OrderedDict()
        self._newest: dict[str, _Message] = {}
        """The newest report of each job."""
        self._groups: dict[_Group, deque[_Message]] = {}
        self._unique: set[tuple[str, CheckpointSaved | Warned]] = set()
        self.num_facts = 0
        self.dropped: dict[_Group, tuple[Report, int]] = {}
        """The newest report of each group that was dropped, and how many were."""

    def __bool__(self) -> bool:
        return bool(self._messages)

    def __iter__(self) -> Iterator[_Message]:
        return iter(self._messages.values())

    def has(self, report: Report) -> bool:
        """Whether the same report waits already: workers repeat warnings, and reports that training is paused."""
        content = report.content
        return isinstance(content, CheckpointSaved | Warned) and (report.job, content) in self._unique

    def progress(self, job: str) -> _Message | None:
        """Return the newest report of ``job`` if newer progress replaces it."""
        newest = self._newest.get(job)
        return newest if newest and _is_replaceable(newest.content) else None

    def add(self, message: _Message) -> None:
        self._messages[message.id] = message
        report = message.content
        if not isinstance(report, Report):
            return
        self._newest[report.job] = message
        if _is_replaceable(report):
            return
        self.num_facts += 1
        if isinstance(report.content, CheckpointSaved | Warned):
            self._unique.add((report.job, report.content))
        group = self._groups.setdefault(_group(report), deque())
        group.append(message)
        if len(group) > MAX_WAITING:
            self._drop(group[0])

    def _drop(self, message: _Message) -> None:
        self.remove(message)
        report = message.content
        assert isinstance(report, Report)
        _, num_dropped = self.dropped.get(_group(report), (report, 0))
        self.dropped[_group(report)] = report, num_dropped + 1

    def remove(self, message: _Message) -> None:
        """Remove a message, and if it is a fact, the oldest of its group; no effect if it does not wait any more."""
        if self._messages.pop(message.id, None) is None or not isinstance(report := message.content, Report):
            return
        if self._newest.get(report.job) is message:
            del self._newest[report.job]
        if _is_replaceable(report):
            return
        self.num_facts -= 1
        if isinstance(report.content, CheckpointSaved | Warned):
            self._unique.discard((report.job, report.content))
        group = self._groups[_group(report)]
        group.popleft()
        if not group:
            del self._groups[_group(report)]


class ReportQueue:
    """Publishes messages one after the other, first those that an earlier agent left in ``spool``.

    While progress waits, only the newest is kept; a report that is repeated waits once. The newest `MAX_WAITING` facts
    of each kind and worker are kept, and a warning says how many were dropped.
    """

    def __init__(self, bus: Bus, spool: Spool) -> None:
        self._bus = bus
        self._spool = spool
        self._waiting = _Waiting()
        for left in spool.read():
            self._waiting.add(_Message(left.id, left.report))
        self._changed = asyncio.Event()
        self._changed.set()

    @property
    def num_facts(self) -> int:
        """Number of waiting reports that nothing replaces, including those of an earlier agent."""
        return self._waiting.num_facts

    def put(self, content: HostHello | Report) -> None:
        """Queue a message."""
        if isinstance(content, Report):
            if self._waiting.has(content):
                return
            if isinstance(content.content, Progress) and (old := self._waiting.progress(content.job)):
                self._waiting.remove(old)
        elif any(message.content == content for message in self._waiting):
            return
        message = _Message(secrets.token_hex(16), content)
        self._waiting.add(message)
        if isinstance(content, Report) and not _is_replaceable(content):
            self._spool.add(Spooled(id=message.id, report=content))
            self._shorten_spool()
        self._changed.set()

    def _shorten_spool(self) -> None:
        """Rewrite the spool once it has grown by `MAX_WAITING` reports more than are waiting."""
        if self._spool.num_added > self.num_facts + MAX_WAITING:
            reports = ((message.id, message.content) for message in self._waiting)
            self._spool.replace(
                [
                    Spooled(id=id_, report=report)
                    for id_, report in reports
                    if isinstance(report, Report) and not _is_replaceable(report)
                ]
            )

    async def publish(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.flush()

    async def flush(self) -> None:
        """Publish everything queued. A message in flight when this is cancelled is published again by the next call."""
        while message := next(iter(self._waiting), None):
            try:
                with resumed(message.context):
                    await self._bus.publish(_subject(message.content), message.content, message_id=message.id)
            except BusClosed:
                raise
            except ResileError as error:
                logger.error("dropped: %s", error)
            self._waiting.remove(message)
            if not self._waiting:
                self._report_dropped()
        self._spool.clear()

    def _report_dropped(self) -> None:
        dropped, self._waiting.dropped = self._waiting.dropped, {}
        for (_, worker, kind), (report, number) in dropped.items():
            text = f"{number} reports ({kind}) of worker {worker} were dropped: more than {MAX_WAITING} were waiting"
            self.put(report.model_copy(update={"content": Warned(message=text)}))


def _is_replaceable(message: HostHello | Report) -> bool:
    """Whether newer progress replaces it; the end of an epoch is never replaced."""
    if not isinstance(message, Report):
        return False
    return isinstance(message.content, Progress) and not message.content.ends_epoch


def _group(report: Report) -> _Group:
    return report.job, report.worker, report.content.kind


def _subject(message: HostHello | Report) -> str:
    if isinstance(message, HostHello):
        return subjects.host_event(message.host, "hello")
    return subjects.report(message.job, message.content.kind)
