"""Keeps how many slots each job held over time, so that this history outlasts the events and restarts (`job_store.py`).

The history of the pool is stored after those of its jobs, with the sequence up to which all of them include the events:
a monitor that starts reads the events after it. Jobs that recently held slots are in memory, for the chart of the pool.
"""

import asyncio
import logging
from contextlib import aclosing, suppress

from pydantic import BaseModel

from resile_shared.bus.buckets import UnreadableError
from resile_shared.bus.catalogue import model_of
from resile_shared.bus.client import Bus
from resile_shared.bus.connection import StoreFailed
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import EVENTS, JOB_SLOTS, JOBS, POOL_SLOTS, POOL_SLOTS_KEY
from resile_shared.errors import MessageTooLarge
from resile_shared.http.slot_history import SlotsView
from resile_shared.messages.hosts import HostEvent
from resile_shared.messages.jobs import JobEvent
from resile_shared.messages.pool import PolicyEvent
from resile_shared.messages.slot_history import JobSlots, PoolSlots

from ..projection import Projection
from .job_store import JobStore, Kept, store_regularly, write_newer
from .slot_history import JobHistory, PoolHistory, slots_view

logger = logging.getLogger(__name__)

MAX_SECONDS = 2 * 86_400
"""How long a job stays in memory after it last held slots."""


class SlotStore:
    """The slots of the pool and of its jobs over time."""

    def __init__(self, bus: Bus, projection: Projection) -> None:
        self._bus = bus
        self._events = bus.read_stream(EVENTS, model_of)
        self._projection = projection
        self._jobs: JobStore[JobHistory, JobSlots] = JobStore(
            bus.bucket(JOB_SLOTS),
            projection,
            load=lambda stored: JobHistory.of(stored) if stored else JobHistory(),
            dump=lambda history, sequence: history.message(sequence=sequence),
        )
        self._pool = PoolHistory()
        self._revision = 0
        self._is_dirty = False
        self._caught_up = asyncio.Event()
        self._lock = asyncio.Lock()
        """Held while the history is loaded or stored."""

    async def follow(self) -> None:
        """Load the stored history, then handle the events after it, forever.

        Starts over when the sequences of events go back, because an older store of the bus was restored.
        """
        while True:
            self._caught_up.clear()
            async with self._lock:
                await self._load()
                await self._release_removed()
            after, caught_up = self._pool.sequence, self._caught_up
            async with aclosing(self._events.follow(after=after, caught_up=caught_up)) as messages:
                async for received in messages:
                    if (received.sequence or 0) <= self._pool.sequence:
                        break
                    await self.on_event(received)
            logger.warning("events went back, loading the slots over time again")

    async def on_event(self, received: Received[BaseModel]) -> None:
        """Add an event."""
        event, sequence, stored = received.message, received.sequence, received.stored
        assert sequence is not None
        assert stored is not None
        match event:
            case JobEvent(item=item):
                happened = item.time
            case HostEvent() | PolicyEvent():
                happened = event.time
            case _:
                self._pool.sequence = max(self._pool.sequence, sequence)
                return
        time = round(1000 * min(happened, stored).timestamp())
        if isinstance(event, JobEvent):
            kept = await self._jobs.get(event.job)
            kept.is_dirty |= kept.value.add(event, time=time, sequence=sequence)
        self._is_dirty |= self._pool.add(event, time=time, sequence=sequence)

    async def view(self, *, seconds: int) -> SlotsView:
        """Return the last ``seconds``, once all events that were stored when the monitor started are handled."""
        await self._caught_up.wait()
        records = ((self._projection.record(job), kept.value) for job, kept in self._jobs.kept.items())
        return slots_view(self._pool, ((record, value) for record, value in records if record), seconds=seconds)

    async def run(self) -> None:
        """Store changes regularly until cancelled, then a last time, unless that takes long."""
        await store_regularly(self.store)

    async def store(self) -> None:
        """Store what has changed: jobs first, since the pool's sequence holds for all of them."""
        async with self._lock:
            await self._release_removed()
            pool = self._pool.message()
            if await self._jobs.store(pool.sequence, is_needed=self._is_needed) and self._is_dirty:
                await self._store_pool(pool)

    async def _store_pool(self, pool: PoolSlots) -> None:
        self._is_dirty = self._pool.sequence > pool.sequence
        try:
            self._revision, is_stored = await write_newer(
                self._bus.bucket(POOL_SLOTS), POOL_SLOTS_KEY, pool, revision=self._revision
            )
            self._is_dirty |= not is_stored
        except (StoreFailed, MessageTooLarge) as error:
            self._is_dirty = True
            logger.warning("slots of the pool not stored: %s", error)

    def _is_needed(self, history: JobHistory) -> bool:
        return history.held.last > 0 or history.newest >= self._pool.newest - 1000 * MAX_SECONDS

    async def _release_removed(self) -> None:
        """Release the slots of jobs that were removed, with the events of their ends, before these were read."""
        for job in [job for job in self._pool.holding if self._projection.record(job) is None]:
            with suppress(UnreadableError):
                if await self._bus.bucket(JOBS).get(job) is None:  # else the projection is behind
                    self._pool.release(job)
                    self._is_dirty = True

    async def _load(self) -> None:
        """Load what is stored. If some of it is ahead of the events, rebuild it from the existing events."""
        self._pool, self._revision = PoolHistory(), 0
        try:
            if entry := await self._bus.bucket(POOL_SLOTS).get(POOL_SLOTS_KEY):
                self._pool, self._revision = PoolHistory.of(entry.value), entry.revision
        except UnreadableError as error:
            logger.error("%s", error)
        jobs = await self._bus.bucket(JOB_SLOTS).entries()
        last = await self._events.last()
        ahead = {job for job, stored in jobs.items() if stored.value.sequence > last}
        self._is_dirty = bool(ahead) or self._pool.sequence > last
        if self._is_dirty:
            self._pool = PoolHistory()
        self._jobs.kept.clear()
        for job, stored in jobs.items():
            if job in ahead:
                self._jobs.kept[job] = Kept(JobHistory(), stored.revision, is_dirty=True)
            elif self._is_needed(JobHistory.of(stored.value)):
                self._jobs.put(job, stored)
