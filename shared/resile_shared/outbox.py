"""Events from a job's history: each item is published once as its reader sees it, whatever crashes in between.

The record is stored first; the outbox then publishes every item beyond its cursor and moves the cursor. A crash before
the cursor is stored publishes items again under the same message id ``<job>/<number>``: the bus drops them as
duplicates, and readers drop ids and numbers that they have seen.
"""

import asyncio

from .buckets import ConflictError
from .bus import Bus
from .messages.cursor import Cursor
from .messages.jobs import JobEvent, JobRecord
from .subjects import OUTBOX, job_event


class Outbox:
    """Publishes the history of jobs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._cursors = bus.bucket(OUTBOX)
        self._known: dict[str, tuple[int, int]] = {}
        """For each job: the number published last, and the revision of its stored cursor; both 0 before the first."""
        self._lock = asyncio.Lock()

    async def flush(self, record: JobRecord) -> None:
        """Publish what the stored ``record`` has that is not published; an older record than the last does nothing."""
        async with self._lock:
            published, revision = await self._cursor(record.job)
            new = record.history[published:]
            if not new:
                return
            for item in new:
                event = JobEvent(
                    job=record.job,
                    name=record.spec.name,
                    tenant=record.spec.tenant,
                    state=record.state,
                    priority=record.priority,
                    item=item,
                )
                message_id = f"{record.job}/{item.number}"
                await self._bus.publish(job_event(record.job, item.kind), event, message_id=message_id)
            await self._move(record.job, Cursor(number=new[-1].number), revision)

    async def forget(self, job: str) -> None:
        """Drop the cursor of a job whose record is removed."""
        async with self._lock:
            _, revision = await self._cursor(job)
            if revision:
                await self._cursors.delete(job, revision=revision)
            self._known.pop(job, None)

    async def _cursor(self, job: str) -> tuple[int, int]:
        if job not in self._known:
            entry = await self._cursors.get(job)
            self._known[job] = (entry.value.number, entry.revision) if entry else (0, 0)
        return self._known[job]

    async def _move(self, job: str, cursor: Cursor, revision: int) -> None:
        try:
            if revision:
                revision = await self._cursors.update(job, cursor, revision=revision)
            else:
                revision = await self._cursors.create(job, cursor)
        except ConflictError:  # another scheduler published for this job: go on from its cursor
            self._known.pop(job, None)
        else:
            self._known[job] = (cursor.number, revision)
