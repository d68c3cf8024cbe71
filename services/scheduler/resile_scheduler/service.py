"""The scheduler's shell: takes the lease, tells the core what happens, and has its commands carried out.

- Nothing is heard, and nothing answered, before the lease is taken and what is stored has been read and written again
  with the new epoch.
- A report counts as handled when what it led to is stored, and is read again otherwise.
- Deadlines are looked at only after the bus has been there for a while: what happened during an outage is heard first.
- A scheduler that is deposed, or finds that somebody else wrote, ends. When it is started again it stands by.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext

from pydantic import BaseModel

from resile_shared import subjects
from resile_shared.buckets import Change
from resile_shared.catalogue import model_of
from resile_shared.envelope import Received
from resile_shared.messages import instructions
from resile_shared.messages.commands import Accepted, JobPause, JobPriority, JobResume, JobStop, JobSubmit, Refused
from resile_shared.messages.hosts import Heartbeat, HostRecord
from resile_shared.messages.instructions import Instruction
from resile_shared.messages.pool import PoolSettings
from resile_shared.messages.queries import ExplainJobs, JobExplanations
from resile_shared.messages.reports import Report
from resile_shared.pool_settings import load_pool_settings
from resile_shared.service import ServiceContext
from resile_shared.subjects import HOSTS, LEASE, REPORTS
from resile_shared.telemetry import continued, traced

from .core.core import Scheduler
from .core.events import (
    Command,
    Event,
    JobChangeRequested,
    JobSubmitted,
    PauseWorkers,
    ProbeExpired,
    ProbeHost,
    Reply,
    StateRestored,
    StopWorkers,
    StoreJob,
    Tick,
    WriteAllocation,
)
from .core.policies import POLICIES
from .execution import Batch, Execution
from .lease import Lease
from .settings import SchedulerSettings

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
SETTLE_TICKS = 12
"""Longer than the bus takes to deliver a report again that an earlier scheduler had received and not handled."""


async def run(context: ServiceContext[SchedulerSettings]) -> None:
    """Wait for the lease, then decide until cancelled. Raises LeadershipLost, ConflictError and UsageError."""
    pool = await load_pool_settings(context.bus, detection_seconds=context.settings.detection_seconds)
    holder = f"scheduler-{os.getpid()}-{secrets.token_hex(4)}"
    lease = Lease(
        context.bus.bucket(LEASE), holder=holder, seconds=context.settings.lease_seconds or pool.lease_seconds
    )
    await lease.take()
    logger.info("leads, in epoch %s", lease.epoch)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(lease.hold())
            await _Service(context, pool, lease, group).start()
    finally:
        context.is_ready = False
        await lease.release()


class _Service:
    def __init__(
        self, context: ServiceContext[SchedulerSettings], pool: PoolSettings, lease: Lease, group: asyncio.TaskGroup
    ) -> None:
        self._context = context
        self._bus = context.bus
        self._group = group
        self._core = Scheduler(
            epoch=lease.epoch,
            secret=secrets.token_hex(32),
            policy=POLICIES[context.settings.policy],
            detection_seconds=pool.detection_seconds,
        )
        self._execution = Execution(context.bus, lease)

    async def start(self) -> None:
        jobs, allocations = await self._execution.read()
        changes = self._bus.bucket(HOSTS).watch()
        hosts = tuple(change.value for change in await anext(changes) if change.value is not None)
        self._group.create_task(self._execution.carry_out())
        self._group.create_task(self._execution.publish())
        restored = self._tell(StateRestored(jobs, allocations, hosts))
        if restored is not None:
            await restored.done.wait()
        self._group.create_task(self._watch(changes))
        self._group.create_task(self._bus.follow(REPORTS, Report, self._reported, durable="scheduler"))
        self._group.create_task(self._tick())
        await self._bus.subscribe(subjects.HEARTBEATS, Heartbeat, self._beat)
        await self._bus.serve(subjects.EXPLAIN_JOBS, ExplainJobs, self._explain)
        await self._bus.answer(subjects.JOB_COMMANDS, model_of, self._asked)
        self._context.is_ready = True
        logger.info("%s jobs and %s hosts are stored", len(jobs), len(hosts))

    # events

    async def _watch(self, changes: AsyncGenerator[tuple[Change[HostRecord], ...], None]) -> None:
        async with aclosing(changes):
            async for batch in changes:
                for change in batch:
                    if change.value is not None:
                        with continued(f"host {change.key}", change.headers, always=False):
                            self._tell(change.value)

    async def _beat(self, received: Received[Heartbeat]) -> None:
        self._tell(received.message)

    async def _reported(self, received: Received[Report]) -> None:
        batch = self._tell(received.message)
        if batch is not None:
            await batch.done.wait()

    async def _asked(self, received: Received[BaseModel]) -> Accepted | Refused:
        match received.message:
            case JobSubmit(spec=spec):
                event: Event = JobSubmitted(received.id, spec)
            case JobPriority() | JobStop() | JobPause() | JobResume() as request:
                event = JobChangeRequested(received.id, request)
            case other:
                raise AssertionError(f"no command on jobs: {other}")
        self._tell(event)
        return await self._execution.answer_to(received.id)

    async def _explain(self, _: Received[ExplainJobs]) -> JobExplanations:
        return JobExplanations(reasons=dict(self._core.explain()))

    async def _tick(self) -> None:
        num_steady = 0
        while True:
            begun = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            await self._bus.round_trip()
            num_steady = num_steady + 1 if time.monotonic() - begun < 2 * TICK_SECONDS else 0
            if num_steady >= SETTLE_TICKS:
                self._tell(Tick())

    async def _await_answer(self, challenge: ProbeHost, asked: Batch) -> None:
        """Ask, and tell the core when no answer can come any more and all that came by then was heard."""
        await asked.done.wait()
        question = Instruction(instructions.SendHeartbeat(incarnation=challenge.incarnation))
        await self._bus.send_to_listener(subjects.instruction(challenge.host), question, seconds=challenge.seconds)
        await self._bus.round_trip()
        self._tell(ProbeExpired(challenge.host, challenge.incarnation, challenge.beat))

    def _tell(self, event: Event) -> Batch | None:
        """Tell the core; what it commands is carried out in time."""
        repeated = isinstance(event, Heartbeat | Tick)  # without a trace of its own, unless it leads to something
        with nullcontext() if repeated else traced(f"decide upon {type(event).__name__}"):
            commands = self._core.handle(event, now=time.time())
            if not commands:
                return None
            batch = self._batch(commands)
        self._execution.put(batch)
        for command in commands:
            if isinstance(command, ProbeHost):
                self._group.create_task(self._await_answer(command, batch))
        for allocation in batch.allocations:
            slots = " ".join(placement.slot_name for placement in allocation.placements) or "none"
            what = "ordered" if allocation.has_addresses else "allocated"
            logger.info("%s: generation %s %s: %s", allocation.job, allocation.generation, what, slots)
        return batch

    # commands

    def _batch(self, commands: Sequence[Command]) -> Batch:
        return Batch(
            records=tuple(c.record for c in commands if isinstance(c, StoreJob)),
            answers=tuple((c.command, c.answer) for c in commands if isinstance(c, Reply)),
            allocations=tuple(c.allocation for c in commands if isinstance(c, WriteAllocation)),
            instructions=tuple(told for c in commands for told in self._instructions(c)),
        )

    def _instructions(self, command: Command) -> list[tuple[str, Instruction]]:
        """Return what agents are told, and on which hosts; those that are not meant ignore it."""
        match command:
            case StopWorkers(job, host, incarnation, workers):
                stop = instructions.StopWorkers(job=job, incarnation=incarnation, workers=workers)
                return [(host, Instruction(stop))]
            case PauseWorkers(job, generation, hosts):
                pause = instructions.PauseWorkers(job=job, generation=generation)
                return [(host, Instruction(pause)) for host in hosts]
            case _:
                return []
