"""The scheduler's shell: acquires the lease, passes events to the core, and has its commands executed.

- It receives and answers nothing before it has the lease, and has read what is stored and written it again with the new
  epoch.
- The lease says how far the reports are read: up to the newest one whose effects are stored. The next leader reads on
  from there at once, whatever a frozen one has received.
- Deadlines are checked only after NATS has been connected for a while, and when what was reported by then has had its
  effect: what happened before comes first, however long it takes to read and to store.
- A report that the core cannot handle fails its job, goes to the dead letters, and is read no more. The core starts
  over then, as after a request or a heartbeat that it cannot handle (`core/restart.py`).
- A scheduler that loses the lease, or finds that another one wrote, exits. When it is started again it stands by.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from itertools import count

from nats.aio.msg import Msg
from pydantic import BaseModel

from resile_shared.bus import subjects
from resile_shared.bus.buckets import Change
from resile_shared.bus.catalogue import model_of
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import HOSTS, LEASE, REPORTS
from resile_shared.clock import SteadyClock
from resile_shared.messages import instructions
from resile_shared.messages.commands import (
    Accepted,
    ExplainJobs,
    JobDelete,
    JobExplanations,
    JobPause,
    JobPriority,
    JobResume,
    JobStop,
    JobSubmit,
    PoolPolicy,
    PoolSuspend,
    Refused,
    TenantDelete,
    TenantSet,
)
from resile_shared.messages.hosts import Heartbeat, HostRecord, ProbeFailed
from resile_shared.messages.instructions import Instruction
from resile_shared.messages.pool import PoolSettings
from resile_shared.messages.reports import Report, Switched
from resile_shared.pool_settings import load_pool_settings
from resile_shared.recent_events import InternalError
from resile_shared.service import ServiceContext
from resile_shared.telemetry.metrics import gauge
from resile_shared.telemetry.traces import carries_trace, continued, traced

from .core.core import Scheduler
from .core.events import (
    AssignJobs,
    Command,
    Event,
    HostRemoved,
    JobChangeRequested,
    JobNotStored,
    JobRemoved,
    JobSubmitted,
    PauseWorkers,
    PolicyChangeRequested,
    PoolSuspendRequested,
    ProbeExpired,
    ProbeHost,
    RemoveJob,
    Reply,
    Request,
    StateRestored,
    StopWorkers,
    StoreJob,
    StorePolicy,
    StoreTenants,
    StoreUsage,
    TenantChangeRequested,
    Tick,
    WriteAllocation,
)
from .core.restart import RestartableScheduler
from .core.retention import Limits
from .decision_spans import about, is_timed, name_of
from .executor import Batch, Executor
from .lease import Lease
from .loss_spans import LossSpans, lost_hosts
from .metrics import SchedulerMetrics
from .policies.table import POLICIES
from .remover import Remover
from .settings import SchedulerSettings

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
MEASURE_TICKS = 5
"""Ticks in which at most one measurement of each job is handled."""
MEASUREMENT = b'"measurement":{'
"""Bytes that every progress report with a measurement contains."""
SETTLE_TICKS = 12
"""Steady ticks before deadlines are checked: longer than agents take to reconnect and publish what they kept."""


async def run(context: ServiceContext[SchedulerSettings]) -> None:
    """Wait for the lease, then decide until cancelled. Raises LeadershipLost, FencedError and UsageError."""
    pool = await load_pool_settings(context.bus, detection_seconds=context.settings.detection_seconds)
    holder = f"scheduler-{os.getpid()}-{secrets.token_hex(4)}"
    lease = Lease(
        context.bus.bucket(LEASE), holder=holder, seconds=context.settings.lease_seconds or pool.lease_seconds
    )
    await lease.acquire()
    logger.info("became leader epoch=%s", lease.epoch)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(lease.keep())
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
        secret = secrets.token_hex(32)
        self._core = RestartableScheduler(
            lambda chosen: Scheduler(
                epoch=lease.epoch,
                secret=secret,
                policies=POLICIES,
                chosen=chosen,
                detection_seconds=pool.detection_seconds,
                limits=Limits(pool.keep_jobs, pool.keep_days),
            ),
            chosen=PoolPolicy(policy=context.settings.policy, preemption=context.settings.preemption),
        )
        self._clock = SteadyClock()
        self._measured: set[str] = set()
        """The progress subjects of the jobs that were measured recently."""
        self._losses = LossSpans(detection_seconds=pool.detection_seconds)
        self._is_reading = False
        """Whether the effects of a report are being stored."""
        self._lease = lease
        self._executor = Executor(context.bus, lease, on_refused=self._on_refused)
        self._remover = Remover(
            context.bus, lease, self._executor, context.settings.storage, on_removed=self._on_removed
        )
        self._newest_report = 0
        """The sequence of the newest report when it was last looked up."""
        self._metrics = SchedulerMetrics(context.meter, self._core)
        self._measure_shell()

    def _measure_shell(self) -> None:
        meter, executor = self._context.meter, self._executor
        lag, lease = "Stored reports that the scheduler has not read.", self._lease
        gauge(meter, "resile_bus_lag_messages", lambda: max(0, self._newest_report - lease.position), lag)
        gauge(meter, "resile_outbox_items", lambda: executor.num_unpublished, "History items not published yet.")
        gauge(meter, "resile_scheduler_batches", lambda: executor.num_batches, "Decisions not stored yet.")

    async def start(self) -> None:
        stored = await self._executor.read()
        changes = self._bus.bucket(HOSTS).watch()
        hosts = tuple(change.value for change in await anext(changes) if change.value is not None)
        self._group.create_task(self._executor.run())
        self._group.create_task(self._executor.publish())
        self._group.create_task(self._executor.retry())
        self._group.create_task(self._remover.run())
        restored = self._handle(
            StateRestored(
                stored.records,
                stored.allocations,
                hosts,
                last_number=stored.last_number,
                policy=stored.policy,
                tenants=stored.tenants,
                removed_usage=stored.usage,
            )
        )
        if restored is not None:
            await restored.done.wait()
        self._group.create_task(self._watch(changes))
        self._group.create_task(self._follow_reports())
        self._group.create_task(self._tick())
        await self._bus.subscribe(subjects.HEARTBEATS, Heartbeat, self._on_heartbeat)
        await self._bus.subscribe(subjects.SUSPICIONS, Report, self._on_unstored)
        progress = subjects.reports_of_kind("progress")
        await self._bus.subscribe(progress, Report, self._on_unstored, fast_path=self._is_no_news)
        await self._bus.serve(subjects.EXPLAIN_JOBS, ExplainJobs, self._explain)
        for commands in (subjects.JOB_COMMANDS, subjects.POOL_COMMANDS, subjects.TENANT_COMMANDS):
            await self._bus.answer(commands, model_of, self._on_command)
        self._context.is_ready = True
        logger.info("restored jobs=%s hosts=%s", len(stored.records), len(hosts))

    # events

    async def _watch(self, changes: AsyncGenerator[tuple[Change[HostRecord], ...], None]) -> None:
        async with aclosing(changes):
            async for batch in changes:
                for change in batch:
                    is_traced, about = carries_trace(change.headers), {"host": change.key}
                    with continued("host changed", change.headers, about) if is_traced else nullcontext():
                        self._handle(change.value or HostRemoved(change.key))

    async def _on_unstored(self, received: Received[Report]) -> None:
        self._handle_or_drop(received.message)

    async def _on_heartbeat(self, received: Received[Heartbeat]) -> None:
        self._handle_or_drop(received.message)

    def _is_no_news(self, progress: Msg) -> bool:
        """Whether it measures nothing, or its job was just measured: jobs report progress several times a second."""
        if progress.subject in self._measured or MEASUREMENT not in progress.data:
            return True
        self._measured.add(progress.subject)
        return False

    async def _follow_reports(self) -> None:
        newest = await self._bus.read_stream(REPORTS, Report).last()  # the bus may have lost some
        await self._bus.follow(REPORTS, Report, self._on_report, after=min(self._lease.position, newest))

    async def _on_report(self, received: Received[Report]) -> None:
        report, fault = received.message, None
        self._is_reading = True
        try:
            try:
                batch = self._handle(report)
            except InternalError as error:
                batch, fault = self._drop(report, error), error
            if batch is not None:
                await batch.done.wait()
            if isinstance(report.content, Switched):
                self._executor.trains(report.job)
        finally:
            self._is_reading = False
        assert received.sequence is not None
        self._lease.position = received.sequence
        if fault is not None:
            raise fault

    def _handle_or_drop(self, event: Report | Heartbeat | Request) -> None:
        try:
            self._handle(event)
        except InternalError as error:
            self._drop(event, error)
            raise

    def _drop(self, event: Report | Heartbeat | Request, error: InternalError) -> Batch | None:
        """Go on without what the core cannot handle; its sender bears the cost. A dead letter says what it was.

        If the core cannot start over either, the event is not at fault, and the service ends.
        """
        try:
            return self._handle(self._core.without(event, error.fault, now=self._clock.now()))
        except InternalError as own:
            self._group.create_task(_fail(own))
            raise

    async def _on_command(self, received: Received[BaseModel]) -> Accepted | Refused:
        match received.message:
            case JobSubmit(spec=spec):
                event: Request = JobSubmitted(received.id, spec)
            case JobPriority() | JobStop() | JobPause() | JobResume() | JobDelete() as request:
                event = JobChangeRequested(received.id, request)
            case PoolSuspend(epoch=epoch):
                event = PoolSuspendRequested(received.id, epoch)
            case PoolPolicy() as choice:
                event = PolicyChangeRequested(received.id, choice)
            case TenantSet() | TenantDelete() as request:
                event = TenantChangeRequested(received.id, request)
            case other:
                raise AssertionError(f"not a command to the scheduler: {other}")
        self._handle_or_drop(event)
        answer = await self._executor.answer_to(received.id)
        if isinstance(answer, Accepted) and isinstance(received.message, JobSubmit | JobResume):
            self._executor.requested(answer.job_id or "")
        return answer

    def _on_removed(self, job: str) -> None:
        self._handle(JobRemoved(job))

    def _on_refused(self, job: str, reason: str) -> None:
        self._handle(JobNotStored(job, reason))

    async def _explain(self, _: Received[ExplainJobs]) -> JobExplanations:
        return JobExplanations(reasons=dict(self._core.explain()))

    async def _tick(self) -> None:
        num_steady = 0
        for number in count(1):
            if number % MEASURE_TICKS == 0:
                self._measured.clear()
            begun = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            await self._bus.round_trip()
            num_steady = num_steady + 1 if time.monotonic() - begun < 2 * TICK_SECONDS else 0
            is_behind = self._is_reading and self._lease.position < self._newest_report
            self._newest_report = await self._bus.read_stream(REPORTS, Report).last()
            if num_steady >= SETTLE_TICKS and not is_behind:
                self._handle(Tick())

    async def _remove(self, command: RemoveJob, batch: Batch) -> None:
        """Remove a job once its deletion is stored."""
        await batch.done.wait()
        self._remover.put(command)

    async def _probe(self, probe: ProbeHost, batch: Batch) -> None:
        """Ask for a heartbeat; report when the time for it is over, after all that arrived by then."""
        await batch.done.wait()
        question = Instruction(instructions.SendHeartbeat(incarnation=probe.incarnation))
        await self._bus.send_to_listener(subjects.instruction(probe.host), question, seconds=probe.seconds)
        await self._bus.round_trip()
        self._handle(ProbeExpired(probe.host, probe.incarnation, probe.beat))

    def _handle(self, event: Event) -> Batch | None:
        """Pass an event to the core, and its commands to the executor."""
        with nullcontext() if is_timed(event) else traced(name_of(event), about(event)):
            now, begun = self._clock.now(), time.perf_counter()
            self._losses.on_event(event, now=now)
            commands = self._core.handle(event, now=now)
            self._metrics.on_handled(event, commands, seconds=time.perf_counter() - begun, now=now)
            if not commands:
                return None
            with self._losses.outcome(event, commands, now=now):
                batch = self._batch(commands)
                self._executor.put(batch)
                for command in commands:
                    if isinstance(command, ProbeHost):
                        self._group.create_task(self._probe(command, batch))
                    elif isinstance(command, RemoveJob):
                        self._group.create_task(self._remove(command, batch))
                if isinstance(event, ProbeExpired) and event.host in lost_hosts(event, commands):
                    failed = ProbeFailed(host=event.host, incarnation=event.incarnation)
                    self._group.create_task(self._bus.send(subjects.probe(event.host), failed))
        for allocation in batch.allocations:
            slots = ",".join(placement.slot_name for placement in allocation.placements) or "none"
            what = "ordered" if allocation.has_addresses else "allocated"
            logger.info("%s job=%s generation=%s slots=%s", what, allocation.job, allocation.generation, slots)
        return batch

    # commands

    def _batch(self, commands: Sequence[Command]) -> Batch:
        return Batch(
            records=tuple((c.record, c.items) for c in commands if isinstance(c, StoreJob)),
            policy=next((c.record for c in commands if isinstance(c, StorePolicy)), None),
            usage=tuple(c.usage for c in commands if isinstance(c, StoreUsage)),
            tenants=next((c.record for c in commands if isinstance(c, StoreTenants)), None),
            answers=tuple((c.command, c.answer) for c in commands if isinstance(c, Reply)),
            allocations=tuple(c.allocation for c in commands if isinstance(c, WriteAllocation)),
            instructions=tuple(instruction for c in commands for instruction in self._instructions(c)),
        )

    def _instructions(self, command: Command) -> list[tuple[str, Instruction]]:
        """Return the instructions to agents, with their hosts."""
        match command:
            case AssignJobs(host, incarnation, jobs, environments):
                assign = instructions.AssignJobs(
                    epoch=self._core.epoch, incarnation=incarnation, jobs=jobs, environments=environments
                )
                return [(host, Instruction(assign))]
            case StopWorkers(job, host, incarnation, workers):
                stop = instructions.StopWorkers(
                    epoch=self._core.epoch, job=job, incarnation=incarnation, workers=workers
                )
                return [(host, Instruction(stop))]
            case PauseWorkers(job, lineage, hosts):
                pause = instructions.PauseWorkers(epoch=self._core.epoch, job=job, lineage=lineage)
                return [(host, Instruction(pause)) for host in hosts]
            case _:
                return []


async def _fail(error: Exception) -> None:
    raise error
