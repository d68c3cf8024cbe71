"""Executes the commands of the core in batches, each in the order that keeps the promises.

1. What removed jobs have used is stored, then records, with the new items of their history, the policy, and the
   tenants. From then on the outbox publishes the items.
2. Requests are answered: what they changed is stored.
3. Allocations are stored.
4. Instructions are sent; the core repeats those that are lost. An agent that is told not to watch a job any more finds
   no worker of its host in the allocation that is stored by then, even if it watches the job again.

Before each batch the lease is confirmed. A leader takes the buckets over before it reads them, and each of its writes
is fenced, so that an earlier leader, which may have stood still for any time, can store nothing from then on.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from opentelemetry.context import Context, get_current
from pydantic import BaseModel

from resile_shared.bus import subjects
from resile_shared.bus.buckets import Bucket, ConflictError, Fence
from resile_shared.bus.client import Bus
from resile_shared.bus.connection import StoreFailed
from resile_shared.bus.outbox import Outbox
from resile_shared.bus.subjects import (
    ALLOCATIONS,
    EVENTS,
    JOBS,
    NUMBERS,
    NUMBERS_KEY,
    POLICY,
    POLICY_KEY,
    TENANTS,
    TENANTS_KEY,
    USAGE,
)
from resile_shared.errors import MessageTooLarge
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.commands import Accepted, Refused
from resile_shared.messages.instructions import Instruction
from resile_shared.messages.jobs import MAX_UNPUBLISHED, FailureCounts, HistoryItem, JobNumber, JobRecord
from resile_shared.messages.pool import PolicyEvent, PolicyRecord, TenantEvent, TenantsRecord
from resile_shared.messages.usage import RemovedUsage
from resile_shared.telemetry.traces import resumed, traced

from .core.state.pool import number_of
from .decision_spans import of_jobs
from .job_starts import JobStarts
from .lease import Lease

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 16
RETRY_SECONDS = 5.0
"""Seconds between two attempts to store the end of a job that the bus has refused even in brief."""
MAX_UNPUBLISHED_BYTES = 2 << 20
"""The most unpublished bytes of one job's history: before more are stored, the items are published."""
_REFUSALS = (MessageTooLarge, StoreFailed)
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Batch:
    """The commands that follow from one event, and its trace."""

    records: tuple[tuple[JobRecord, tuple[HistoryItem, ...]], ...] = ()
    """Records, each with the new items of its history."""
    policy: PolicyRecord | None = None
    tenants: TenantsRecord | None = None
    usage: tuple[RemovedUsage, ...] = ()
    answers: tuple[tuple[str, Accepted | Refused], ...] = ()
    allocations: tuple[Allocation, ...] = ()
    instructions: tuple[tuple[str, Instruction], ...] = ()
    """Instructions to agents, each with the agent's host."""
    retries: bool = False
    """Whether the ends of jobs that are not stored yet are stored now."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    context: Context = field(default_factory=get_current)

    @property
    def jobs(self) -> list[str]:
        """The jobs that it changes, each once."""
        stored, written = [record.job for record, _ in self.records], [each.job for each in self.allocations]
        return list(dict.fromkeys([*stored, *written]))


@dataclass(frozen=True)
class Stored:
    """What a new leader finds."""

    records: tuple[JobRecord, ...]
    allocations: tuple[Allocation, ...]
    last_number: int
    """The highest number of a job that is gone or cannot be read: no other job gets it."""
    policy: PolicyRecord | None
    tenants: TenantsRecord | None
    usage: tuple[RemovedUsage, ...]


class Executor:
    """Executes batches in the order in which they are put, and publishes what is stored."""

    def __init__(self, bus: Bus, lease: Lease, *, on_refused: Callable[[str, str], None]) -> None:
        """``on_refused`` is called with a job, and the reason why the bus does not store it: the job has to end."""
        self._bus = bus
        self._lease = lease
        self._on_refused = on_refused
        self._refused: dict[str, tuple[HistoryItem, ...]] = {}
        """The jobs that the bus has refused to store, each with the items of its history that are not stored."""
        self._unstored: dict[str, JobRecord] = {}
        """The refused jobs that have ended and that the bus has refused even in brief."""
        self._jobs = _Owned(bus.bucket(JOBS))
        self._allocations = _Owned(bus.bucket(ALLOCATIONS))
        self._numbers = _Owned(bus.bucket(NUMBERS))
        self._policy = _Owned(bus.bucket(POLICY))
        self._tenants = _Owned(bus.bucket(TENANTS))
        self._usage = _Owned(bus.bucket(USAGE))
        self._last_number = 0
        """The highest number of a removed job that this scheduler has stored."""
        self._outbox = Outbox(bus)
        self._batches: asyncio.Queue[Batch] = asyncio.Queue()
        self._to_publish: asyncio.Queue[tuple[str, Context]] = asyncio.Queue()
        self._answers: dict[str, asyncio.Future[Accepted | Refused]] = {}
        self._starts = JobStarts()

    async def read(self) -> Stored:
        """Take over from earlier leaders; return what is stored. Raises FencedError if a later leader has done so."""
        epoch = self._lease.epoch
        records, unreadable = await self._jobs.take_over(epoch)
        allocations, _ = await self._allocations.take_over(epoch)
        numbers, _ = await self._numbers.take_over(epoch)
        policies, _ = await self._policy.take_over(epoch)
        tenants, _ = await self._tenants.take_over(epoch)
        usage, _ = await self._usage.take_over(epoch)
        for record in records:
            self._publish_later(record)
        for policy in policies:
            await self._publish_policy(policy)
        for change in tenants:
            await self._publish_tenant(change)
        known = (*(stored.number for stored in numbers), *map(number_of, unreadable))
        return Stored(
            records,
            allocations,
            last_number=max(known, default=0),
            policy=next(iter(policies), None),
            tenants=next(iter(tenants), None),
            usage=usage,
        )

    async def remove(self, job: str) -> None:
        """Remove the allocation and the record of a job for which nothing else is stored any more."""
        await self._lease.confirm()
        await self._outbox.forget(job)
        number = number_of(job)
        if number > self._last_number:
            await self._numbers.put(NUMBERS_KEY, JobNumber(number=number))
            self._last_number = number
        await self._allocations.remove(job)
        await self._jobs.remove(job)
        self._refused.pop(job, None)
        self._unstored.pop(job, None)
        self._starts.forget(job)

    def is_refused(self, job: str) -> bool:
        """Whether the newest record of ``job`` is not stored, since the bus refuses it."""
        return job in self._refused

    def requested(self, job: str) -> None:
        """Attribute the start of ``job`` to the current trace, that of its submission or resumption."""
        self._starts.requested(job)

    def trains(self, job: str) -> None:
        """Attribute what happens to ``job`` from now on to the trace of its cause: the job has started."""
        self._starts.forget(job)

    @property
    def num_batches(self) -> int:
        """How many batches wait."""
        return self._batches.qsize()

    @property
    def num_unpublished(self) -> int:
        """How many items of histories are stored and may not be published."""
        return self._outbox.num_unpublished

    def put(self, batch: Batch) -> None:
        """Add ``batch`` to the queue."""
        self._batches.put_nowait(batch)

    def answer_to(self, command: str) -> asyncio.Future[Accepted | Refused]:
        """Return the future answer to the request ``command``."""
        answer = self._answers[command] = asyncio.get_running_loop().create_future()
        return answer

    async def run(self) -> None:
        """Execute batches forever. Raises LeadershipLost, and FencedError if a later leader took over."""
        while True:
            batch = await self._batches.get()
            await self._lease.confirm()
            with resumed(batch.context), traced("carry out", of_jobs(batch.jobs)):
                await self._execute(batch)
            batch.done.set()

    async def publish(self) -> None:
        """Publish what is new in the history of stored records, forever."""
        while True:
            job, context = await self._to_publish.get()
            with resumed(context):
                await self._outbox.flush(job)

    async def retry(self) -> None:
        """Keep trying to store the ends of jobs that the bus refused even in brief, and publish what it refused."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if self._unstored:
                self.put(Batch(retries=True))
            if self._to_publish.empty():
                for job in self._outbox.jobs:
                    self._to_publish.put_nowait((job, get_current()))

    async def _execute(self, batch: Batch) -> None:
        records = [(record, ()) for record in self._unstored.values()] if batch.retries else batch.records
        await _concurrently(self._usage.put(usage.tenant, usage) for usage in batch.usage)
        await _concurrently(self._store(record, items) for record, items in records)
        if batch.policy is not None:
            await self._policy.put(POLICY_KEY, batch.policy)
        if batch.tenants is not None:
            await self._tenants.put(TENANTS_KEY, batch.tenants)
        for command, answer in batch.answers:
            self._answers.pop(command).set_result(self._checked(answer))
        # A slot may pass to another job: the allocation that gives it up is stored before the one that takes it.
        for starts_workers in (False, True):
            stage = [each for each in batch.allocations if each.has_addresses != starts_workers]
            await _concurrently(map(self._store_allocation, stage))
        if batch.policy is not None:
            await self._publish_policy(batch.policy)
        if batch.tenants is not None:
            await self._publish_tenant(batch.tenants)
        for host, instruction in batch.instructions:
            await self._bus.send(subjects.instruction(host), instruction)

    async def _store(self, record: JobRecord, items: tuple[HistoryItem, ...]) -> None:
        """Store ``record``. If the bus refuses it, the job ends: what follows is stored once that is decided.

        Its end is stored in brief. If the bus refuses that too, the bus is full rather than the record too large.
        """
        job = record.job
        if job in self._refused:
            items = (*self._refused[job], *items)
            if not record.state.is_final:
                self._refused[job] = items
                return
            record, items = _reduced(record, items)
        try:
            stored = await self._with_items(record, items)
            await self._jobs.put(job, stored)
        except _REFUSALS as error:
            await self._refuse(job, items, str(error))
            if not record.state.is_final:
                return
            if record == _reduced(record, items)[0]:
                self._unstored[job] = record
            else:
                await self._store(record, ())
        else:
            self._refused.pop(job, None)
            self._unstored.pop(job, None)
            self._publish_later(stored)

    async def _store_allocation(self, allocation: Allocation) -> None:
        if allocation.job in self._refused and allocation.placements:
            return
        try:
            with self._starts.continued(allocation):
                await self._allocations.put(allocation.job, allocation)
        except _REFUSALS as error:
            await self._refuse(allocation.job, (), str(error))

    async def _publish_policy(self, record: PolicyRecord) -> None:
        if record.changed is not None:
            event = PolicyEvent(
                number=record.number, time=record.changed, policy=record.policy, preemption=record.preemption
            )
            await self._publish_change("policy", event)

    async def _publish_tenant(self, record: TenantsRecord) -> None:
        if record.changed is not None and record.tenant is not None:
            share = record.tenants.get(record.tenant)
            event = TenantEvent(number=record.number, time=record.changed, tenant=record.tenant, share=share)
            await self._publish_change("tenant", event)

    async def _publish_change(self, what: str, event: PolicyEvent | TenantEvent) -> None:
        """Publish the newest change of the policy or of the tenants, unless it is published."""
        subject = subjects.pool_event(what)
        newest = await self._bus.last(EVENTS, type(event), subject=subject)
        if newest is not None and newest.message.number >= event.number:
            return
        after = newest.sequence or 0 if newest else 0
        with suppress(ConflictError):  # another scheduler leads, and has published it
            await self._bus.append(EVENTS, subject, event, log=subject, after=after)

    async def _refuse(self, job: str, items: tuple[HistoryItem, ...], reason: str) -> None:
        logger.error("not stored job=%s: %s", job, reason)
        is_known = job in self._refused
        self._refused[job] = items
        if not is_known:
            self._on_refused(job, reason)

    def _checked(self, answer: Accepted | Refused) -> Accepted | Refused:
        if isinstance(answer, Accepted) and answer.job_id in self._refused:
            return Refused(code="unavailable", reason=f"{answer.job_id} cannot be stored: the scheduler's log says why")
        return answer

    async def _with_items(self, record: JobRecord, items: tuple[HistoryItem, ...]) -> JobRecord:
        """Return ``record`` with the items of its history that are not published yet, and the new ones."""
        unpublished = self._outbox.unpublished(record.job)
        num_bytes = sum(map(_num_bytes, (*unpublished, *items)))
        if num_bytes > MAX_UNPUBLISHED_BYTES or len(unpublished) + len(items) > MAX_UNPUBLISHED:
            await self._outbox.flush(record.job)
        unpublished = (*self._outbox.unpublished(record.job), *items)
        num_bytes = sum(map(_num_bytes, unpublished))
        if num_bytes > MAX_UNPUBLISHED_BYTES or len(unpublished) > MAX_UNPUBLISHED:
            raise MessageTooLarge(f"the history of {record.job}", num_bytes)
        return record.model_copy(update={"unpublished": unpublished})

    def _publish_later(self, record: JobRecord) -> None:
        if record.unpublished:
            self._outbox.put(record)
            self._to_publish.put_nowait((record.job, get_current()))


async def _concurrently(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    room = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def with_room(one: Coroutine[Any, Any, None]) -> None:
        async with room:
            await one

    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(with_room(one))


def _reduced(record: JobRecord, items: tuple[HistoryItem, ...]) -> tuple[JobRecord, tuple[HistoryItem, ...]]:
    """Return what little is stored of a job that ended because the bus refused to store it."""
    spec = record.spec.model_copy(update={"args": (), "env": {}})
    completed = record.completed and record.completed.brief()
    update = {"allocation": None, "warnings": (), "failures": FailureCounts(), "completed": completed}
    reduced = record.model_copy(update={"spec": spec, **update})
    return reduced, tuple(item.model_copy(update={"slots": ()}) for item in items)


def _num_bytes(item: HistoryItem) -> int:
    """Return about how many bytes it takes as JSON."""
    return 6 * len(item.reason) + sum(len(slot) + 3 for slot in item.slots)


class _Owned(Generic[M]):
    """A bucket that only the leader writes."""

    def __init__(self, bucket: Bucket[M]) -> None:
        self._bucket = bucket
        self._fence: Fence

    async def take_over(self, epoch: int) -> tuple[tuple[M, ...], set[str]]:
        """Return all values, and the keys of those that cannot be read."""
        self._fence = await self._bucket.take_over(epoch)
        unreadable: set[str] = set()
        entries = await self._bucket.entries(unreadable=unreadable)
        return tuple(entry.value for entry in entries.values()), unreadable

    async def remove(self, key: str) -> None:
        await self._bucket.remove(key, fence=self._fence)

    async def put(self, key: str, value: M) -> None:
        await self._bucket.put(key, value, fence=self._fence)
