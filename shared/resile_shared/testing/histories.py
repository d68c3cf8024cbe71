"""Checks of a job's history that hold whatever was killed."""

import asyncio

from .. import subjects
from ..messages.jobs import JobEvent, JobRecord
from ..subjects import EVENTS
from .fixtures import Pool

SECONDS = 30.0


async def check_history(pool: Pool, record: JobRecord) -> None:
    """Assert that a history has no gap and no double, in the record and, once all is published, on the event stream."""
    numbers = list(range(1, len(record.history) + 1))
    assert [item.number for item in record.history] == numbers
    bus = await pool.bus("monitor")
    events = bus.read_stream(EVENTS, JobEvent, subject=subjects.job_events(record.job))
    async with asyncio.timeout(SECONDS):
        while True:
            stored = (await events.tail(10_000)).messages
            if len(stored) >= len(numbers):
                break
            await asyncio.sleep(0.02)
    assert [received.message.item.number for received in stored] == numbers, f"of {record.job} on the event stream"
