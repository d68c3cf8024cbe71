"""The history of jobs on the event stream: each item is there once, in order, whatever crashes in between.

An item is stored in the record of its job first, with what it tells of. The outbox then appends it to the job's events,
and a later write of the record leaves it out. The end of the stream tells what is published: an item is appended only
directly after the one before it, so neither a crash, nor a message that is sent twice, nor a deposed scheduler adds an
item again.
"""

import asyncio
import logging

from ..errors import MessageTooLarge
from ..messages.jobs import HistoryItem, JobEvent, JobRecord
from .buckets import ConflictError
from .client import Bus
from .connection import StoreFailed
from .envelope import Malformed
from .subjects import EVENTS, job_event, job_events

logger = logging.getLogger(__name__)


class Outbox:
    """Publishes what stored records hold of the history of jobs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._stored: dict[str, JobRecord] = {}
        """The newest stored records with items that may not have been published yet."""
        self._ends: dict[str, tuple[int, int]] = {}
        """For each job the number of the item published last, and its sequence in the stream; both 0 if none was."""
        self._lock = asyncio.Lock()

    def put(self, record: JobRecord) -> None:
        """Take over ``record``, which is stored: `flush` publishes its items."""
        self._stored[record.job] = record

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs with stored items that may not have been published yet."""
        return tuple(self._stored)

    @property
    def num_unpublished(self) -> int:
        """How many stored items of all jobs may not have been published yet."""
        return sum(len(self.unpublished(job)) for job in self._stored)

    def unpublished(self, job: str) -> tuple[HistoryItem, ...]:
        """Return the stored items that may not have been published yet."""
        record = self._stored.get(job)
        number, _ = self._ends.get(job, (0, 0))
        return tuple(item for item in record.unpublished if item.number > number) if record else ()

    async def flush(self, job: str) -> None:
        """Publish what is not published of ``job``. What the bus refuses stays unpublished until the next call."""
        async with self._lock:
            try:
                while items := self.unpublished(job):
                    await self._publish(self._stored[job], items)
            except (StoreFailed, MessageTooLarge, Malformed) as error:
                logger.error("history not published job=%s: %s", job, error)
            else:
                self._stored.pop(job, None)

    async def forget(self, job: str) -> None:
        """Forget a job that is removed, once nothing of it is being published."""
        async with self._lock:
            self._stored.pop(job, None)
            self._ends.pop(job, None)

    async def _publish(self, record: JobRecord, items: tuple[HistoryItem, ...]) -> None:
        job = record.job
        if job not in self._ends:
            self._ends[job] = await self._find_end(job)
            return
        for item in items:
            event = JobEvent(
                job=job,
                name=record.spec.name,
                tenant=record.spec.tenant,
                state=record.state,
                priority=record.priority,
                item=item,
                min_workers=record.spec.min_workers,
                max_workers=record.spec.max_workers,
                sizes=record.spec.sizes,
                group=record.spec.group,
                num_shards=record.ready.num_shards if record.ready else None,
                iterations_total=record.ready.iterations_total if record.ready else None,
            )
            subject = job_event(job, item.kind)
            try:
                sequence = await self._bus.append(EVENTS, subject, event, log=job_events(job), after=self._ends[job][1])
            except ConflictError:  # another scheduler has published for this job: go on where its events end
                del self._ends[job]
                return
            self._ends[job] = (item.number, sequence)

    async def _find_end(self, job: str) -> tuple[int, int]:
        newest = await self._bus.last(EVENTS, JobEvent, subject=job_events(job))
        if newest is None:
            return 0, 0
        assert newest.sequence is not None
        return newest.message.item.number, newest.sequence
