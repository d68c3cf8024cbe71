"""Checks of a job's history that hold whatever was killed."""

import asyncio

from resile_shared.bus import subjects
from resile_shared.bus.subjects import EVENTS
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobRecord

from .fixtures import Pool

SECONDS = 30.0


async def check_history(pool: Pool, record: JobRecord) -> list[HistoryItem]:
    """Assert that a history has no gaps or duplicates: its end in the record and, once published, the event stream."""
    numbers = list(range(1, record.num_items + 1))
    end = [item.number for item in record.unpublished]
    assert end == numbers[len(numbers) - len(end) :], f"unpublished items of {record.job}"
    bus = await pool.bus("monitor")
    events = bus.read_stream(EVENTS, JobEvent, subject=subjects.job_events(record.job))
    async with asyncio.timeout(SECONDS):
        while True:
            stored = (await events.tail(100_000)).messages
            if len(stored) >= len(numbers):
                break
            await asyncio.sleep(0.02)
    assert [received.message.item.number for received in stored] == numbers, f"of {record.job} on the event stream"
    return [received.message.item for received in stored]
