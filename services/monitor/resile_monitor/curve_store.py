"""Keeps the curves of jobs in a bucket, so that they outlast the reports, and every restart.

Any number of monitors may do this. Each makes the same of the same reports, and a write names the value that it
replaces, so whichever comes first is right. Only jobs that report are in memory: what has not changed for a while is
read from the bucket when somebody asks. A monitor that starts reads the reports on from where those that are stored
end. The curves of a deleted job are removed by the scheduler with everything else, and by each monitor that may have
stored some afterwards.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field

from resile_shared.buckets import ConflictError, Entry, UnreadableError
from resile_shared.bus import Bus
from resile_shared.connection import StoreFailed
from resile_shared.envelope import Received
from resile_shared.errors import MessageTooLarge
from resile_shared.messages.curves import Curves
from resile_shared.messages.reports import Progress, Report
from resile_shared.subjects import CURVES

from .curves import JobCurves
from .projection import Projection

logger = logging.getLogger(__name__)

STORE_SECONDS = 30.0
CLOSE_SECONDS = 3.0
MAX_UNRECORDED = 20
"""Looks after which a job that reports and never has a record counts as deleted."""


@dataclass
class _Kept:
    """Curves in memory."""

    curves: JobCurves = field(default_factory=JobCurves)
    revision: int = 0
    """Of what is stored; 0: nothing, or not known."""
    is_dirty: bool = False
    num_unrecorded: int = 0
    """How often in a row its job had no record."""


class CurveStore:
    """The curves of all jobs: those of reports that were handled, and those that are stored."""

    def __init__(self, bus: Bus, projection: Projection) -> None:
        self._bus = bus
        self._projection = projection
        self._kept: dict[str, _Kept] = {}
        self._recorded: set[str] = set()
        """Jobs in memory that had a record: without one they are deleted."""
        self._position = 0
        """The newest report that was handled."""

    async def load(self, newest: dict[str, int]) -> int:
        """Return where reading goes on, so that no report is missed of jobs with newest reports of such sequences."""
        behind = [max(newest.values(), default=0)]
        for job, sequence in newest.items():
            entry = await self._read(job)
            stored = entry.value.sequence if entry else 0
            if stored < sequence:
                behind.append(stored)
        self._position = min(behind)
        return self._position

    async def on_report(self, received: Received[Report]) -> None:
        """Add a report of progress."""
        report, sequence = received.message, received.sequence
        assert sequence is not None
        assert isinstance(report.content, Progress)
        self._position = max(self._position, sequence)
        if report.job not in self._kept:
            entry = await self._read(report.job)
            self._kept[report.job] = _Kept(JobCurves.of(entry.value), entry.revision) if entry else _Kept()
        kept = self._kept[report.job]
        record = self._projection.record(report.job)
        active = record.allocation if record else None
        workers = active.workers if active and active.generation == report.generation else None
        time = round(1000 * report.time.timestamp())
        kept.is_dirty |= kept.curves.add(report.content, generation=report.generation, time=time, workers=workers)

    async def curves(self, job: str) -> Curves:
        """Return the curves of a job; empty ones if it has never reported. Waits while NATS is disconnected."""
        if job not in self._kept:
            entry = await self._read(job)
            if job not in self._kept:
                return entry.value if entry else Curves(sequence=0, generation=0)
        return self._kept[job].curves.message(sequence=self._position)

    async def run(self) -> None:
        """Store what has changed once in a while, until cancelled; then a last time, unless that takes long."""
        try:
            while True:
                await asyncio.sleep(STORE_SECONDS)
                await self.store()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.store()

    async def store(self) -> None:
        """Store what has changed, remove what is deleted, and forget what has not changed since the last time."""
        for job, kept in list(self._kept.items()):
            if self._projection.record(job) is None:
                await self._on_unrecorded(job, kept)
                continue
            self._recorded.add(job)
            try:
                if kept.is_dirty:
                    await self._write(job, kept)
                else:
                    self._forget(job)
            except (StoreFailed, MessageTooLarge) as error:
                logger.warning("curves not stored job=%s: %s", job, error)

    async def _write(self, job: str, kept: _Kept) -> None:
        curves = kept.curves.message(sequence=self._position)
        kept.is_dirty = False
        try:
            if kept.revision:
                kept.revision = await self._bus.bucket(CURVES).update(job, curves, revision=kept.revision)
            else:
                kept.revision = await self._bus.bucket(CURVES).create(job, curves)
        except ConflictError:  # another monitor was first: it has the same, or what it lacks is stored next time
            entry = await self._read(job)
            kept.revision = entry.revision if entry else 0
            kept.is_dirty |= entry is None or entry.value.sequence < curves.sequence
        except BaseException:
            kept.is_dirty = True
            raise

    def _forget(self, job: str) -> None:
        del self._kept[job]
        self._recorded.discard(job)

    async def _on_unrecorded(self, job: str, kept: _Kept) -> None:
        """Remove a job that is deleted; the record of another may still come."""
        kept.num_unrecorded += 1
        if job in self._recorded or kept.num_unrecorded > MAX_UNRECORDED:
            await self._remove(job)

    async def _remove(self, job: str) -> None:
        """Remove what this monitor, or another, has stored since the scheduler has removed the job."""
        del self._kept[job]
        self._recorded.discard(job)
        entry = await self._read(job)
        if entry is not None:
            with suppress(ConflictError):
                await self._bus.bucket(CURVES).delete(job, revision=entry.revision)

    async def _read(self, job: str) -> Entry[Curves] | None:
        try:
            return await self._bus.bucket(CURVES).get(job)
        except UnreadableError as error:
            logger.error("%s", error)
            return None
