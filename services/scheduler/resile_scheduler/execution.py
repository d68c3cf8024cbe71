"""Carries out what the core commands: batch after batch, each in the order that keeps the promises.

1. Records are stored. From then on the outbox publishes what is new in their history.
2. Requests are answered: what they changed is stored.
3. Allocations are stored, and agents obey them.
4. Instructions are sent; a lost one is repeated by the core.

A batch is carried out under a lease that is certain, and each write is a compare-and-set against what this scheduler
read or wrote last, so nothing that it decided can overwrite what a newer one did.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from opentelemetry.context import Context, get_current
from pydantic import BaseModel

from resile_shared import subjects
from resile_shared.buckets import Bucket
from resile_shared.bus import Bus
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import Accepted, Refused
from resile_shared.messages.instructions import Instruction
from resile_shared.messages.jobs import JobRecord
from resile_shared.outbox import Outbox
from resile_shared.subjects import ALLOCATIONS, JOBS
from resile_shared.telemetry import resumed, traced

from .lease import Lease

logger = logging.getLogger(__name__)

MAX_UNDER_WAY = 16
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Batch:
    """What one event led to, and the trace in which it did."""

    records: tuple[JobRecord, ...] = ()
    answers: tuple[tuple[str, Accepted | Refused], ...] = ()
    allocations: tuple[Allocation, ...] = ()
    instructions: tuple[tuple[str, Instruction], ...] = ()
    """Hosts, and what their agents are told."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    context: Context = field(default_factory=get_current)


class Execution:
    """Carries out batches in the order in which they are put, and publishes what is stored."""

    def __init__(self, bus: Bus, lease: Lease) -> None:
        self._bus = bus
        self._lease = lease
        self._jobs = _Owned(bus.bucket(JOBS))
        self._allocations = _Owned(bus.bucket(ALLOCATIONS))
        self._outbox = Outbox(bus)
        self._batches: asyncio.Queue[Batch] = asyncio.Queue()
        self._stored: asyncio.Queue[tuple[JobRecord, Context]] = asyncio.Queue()
        self._answers: dict[str, asyncio.Future[Accepted | Refused]] = {}

    async def read(self) -> tuple[tuple[JobRecord, ...], tuple[Allocation, ...]]:
        """Return all jobs and all allocations, as they are stored."""
        return await self._jobs.read(), await self._allocations.read()

    def put(self, batch: Batch) -> None:
        """Have ``batch`` carried out after those before."""
        self._batches.put_nowait(batch)

    def answer_to(self, command: str) -> asyncio.Future[Accepted | Refused]:
        """Return what becomes the answer to the request ``command``."""
        answer = self._answers[command] = asyncio.get_running_loop().create_future()
        return answer

    async def carry_out(self) -> None:
        """Carry out batches for ever. Raises LeadershipLost, and ConflictError where somebody else wrote."""
        while True:
            batch = await self._batches.get()
            await self._lease.confirm()
            with resumed(batch.context), traced("carry out"):
                await self._carry_out(batch)
            batch.done.set()

    async def publish(self) -> None:
        """Publish what is new in the history of stored records, for ever."""
        while True:
            record, context = await self._stored.get()
            with resumed(context):
                await self._outbox.flush(record)

    async def _carry_out(self, batch: Batch) -> None:
        await self._jobs.write({record.job: record for record in batch.records})
        for record in batch.records:
            self._stored.put_nowait((record, get_current()))
        for command, answer in batch.answers:
            self._answers.pop(command).set_result(answer)
        await self._allocations.write({allocation.job: allocation for allocation in batch.allocations})
        for host, instruction in batch.instructions:
            await self._bus.send(subjects.instruction(host), instruction)


class _Owned(Generic[M]):
    """A bucket that only the leader writes, and the revisions that it knows."""

    def __init__(self, bucket: Bucket[M]) -> None:
        self._bucket = bucket
        self._revisions: dict[str, int] = {}

    async def read(self) -> tuple[M, ...]:
        entries = await self._bucket.entries()
        self._revisions = {key: entry.revision for key, entry in entries.items()}
        return tuple(entry.value for entry in entries.values())

    async def write(self, values: Mapping[str, M]) -> None:
        room = asyncio.Semaphore(MAX_UNDER_WAY)
        async with asyncio.TaskGroup() as group:
            for key, value in values.items():
                group.create_task(self._write(key, value, room))

    async def _write(self, key: str, value: M, room: asyncio.Semaphore) -> None:
        async with room:
            if key in self._revisions:
                self._revisions[key] = await self._bucket.update(key, value, revision=self._revisions[key])
            else:
                self._revisions[key] = await self._bucket.create(key, value)
