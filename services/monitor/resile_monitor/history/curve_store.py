"""Keeps the curves of jobs, so that they outlast the reports, and every restart (`job_store.py`).

Only jobs that report are in memory. Curves that have not changed for a while are read from the bucket when they are
requested. A monitor that starts continues with the reports after those in the stored curves.
"""

from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import CURVES, PROGRESS
from resile_shared.messages.curves import Curves
from resile_shared.messages.reports import Progress, Report

from ..projection import Projection
from .curves import JobCurves
from .job_store import JobStore, store_regularly


class CurveStore:
    """The curves of all jobs: those of reports that were handled, and those that are stored."""

    def __init__(self, bus: Bus, projection: Projection) -> None:
        self._bus = bus
        self._projection = projection
        self._jobs: JobStore[JobCurves, Curves] = JobStore(
            bus.bucket(CURVES),
            projection,
            load=lambda stored: JobCurves.of(stored) if stored else JobCurves(),
            dump=lambda curves, sequence: curves.message(sequence=sequence),
        )
        self._position = 0
        """The sequence of the report that was handled last."""

    async def load(self, newest: dict[str, int]) -> int:
        """Return the sequence after which to read on, so that no report is missed.

        ``newest`` has the sequence of each job's newest report. Stored curves with a later sequence than the stream has
        count as including no report: the bus has lost the end of the stream.
        """
        last = await self._bus.read_stream(PROGRESS, Report).last()
        behind = [max(newest.values(), default=0)]
        for job, sequence in newest.items():
            entry = await self._jobs.read(job)
            stored = entry.value.sequence if entry and entry.value.sequence <= last else 0
            if stored < sequence:
                behind.append(stored)
        self._position = min(behind)
        return self._position

    async def on_report(self, received: Received[Report]) -> None:
        """Add a report of progress."""
        report, sequence = received.message, received.sequence
        assert sequence is not None
        assert isinstance(report.content, Progress)
        self._position = sequence
        kept = await self._jobs.get(report.job)
        record = self._projection.record(report.job)
        active = record.allocation if record else None
        workers = active.workers if active and active.generation == report.generation else None
        time = round(1000 * report.time.timestamp())
        kept.is_dirty |= kept.value.add(report.content, generation=report.generation, time=time, workers=workers)

    async def curves(self, job: str) -> Curves:
        """Return the curves of a job; empty ones if it has never reported. Waits while NATS is disconnected."""
        if job not in self._jobs.kept:
            entry = await self._jobs.read(job)
            if job not in self._jobs.kept:
                return entry.value if entry else Curves(sequence=0, generation=0)
        return self._jobs.kept[job].value.message(sequence=self._position)

    async def run(self) -> None:
        """Store changes regularly until cancelled, then a last time, unless that takes long."""
        await store_regularly(self.store)

    async def store(self) -> None:
        """Store what has changed, remove what is deleted, and forget what has not changed since the last time."""
        await self._jobs.store(self._position, is_needed=lambda _: False)
