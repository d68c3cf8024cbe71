"""One incarnation of an agent: the asyncio shell around its core, until its last worker has ended."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from opentelemetry.context import Context, get_current

from resile_shared.bus import subjects
from resile_shared.bus.buckets import Bucket
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import ALLOCATIONS, HOSTS
from resile_shared.clock import SteadyClock
from resile_shared.messages.allocations import Allocation
from resile_shared.messages.hosts import Heartbeat, HostHello
from resile_shared.messages.instructions import Instruction
from resile_shared.messages.logs import LogLines
from resile_shared.messages.reports import PeerSuspected, Report
from resile_shared.telemetry.traces import context_of

from ..processes.fork_servers import ForkServers
from ..processes.runner import WorkerRunner
from .core import AgentCore
from .environment_builds import EnvironmentBuilds
from .events import (
    AllocationGone,
    AnnounceHost,
    Command,
    EndIncarnation,
    EndTemplate,
    Event,
    ForkWorker,
    HostCommand,
    KillWorker,
    PrepareEnvironments,
    PrepareTemplate,
    SendToWorker,
    StartWorker,
    Tick,
    UnwatchAllocation,
    WatchAllocation,
)
from .host_templates import HostTemplates, KeptTemplates
from .host_traces import HostTraces
from .host_workers import MAX_WAITING_LINES, HostWorkers, WorkerContext
from .job_files import JobFiles
from .metrics import AgentMetrics
from .replicas import HostReplicas
from .reporting import ReportQueue, Spool

logger = logging.getLogger(__name__)

LOG_SECONDS = 0.1
MAX_BATCHES = 5
EXITS_SECONDS = 5.0


class AgentIncarnation:
    """One incarnation. `run` it once, and `close` it when its fork servers have ended."""

    def __init__(
        self,
        bus: Bus,
        hello: HostHello,
        context: WorkerContext,
        fork_servers: ForkServers,
        metrics: AgentMetrics,
    ) -> None:
        self._bus = bus
        self._hello = hello
        self._context = context
        self._fork_servers = fork_servers
        self._metrics = metrics
        self._beat_seconds = context.pool.beat_seconds
        self._clock = SteadyClock()
        self._core = AgentCore(hello.host, hello.incarnation, builds_ahead=True)
        self._events: asyncio.Queue[tuple[Event, Context]] = asyncio.Queue()
        self._traces = HostTraces(hello.host)
        self._templates = HostTemplates(fork_servers, self._post, KeptTemplates(context.folder.path / "templates.json"))
        self._template_commands: asyncio.Queue[PrepareTemplate | EndTemplate] = asyncio.Queue()
        self._replicas = HostReplicas(bus, metrics.on_reply)
        self._workers = HostWorkers(context, self._templates, self._replicas, self._post)
        self._builds = EnvironmentBuilds(context, on_line=self._workers.on_line, post=self._post)
        self._runner = WorkerRunner(fork_servers, self._workers)
        self._reports = ReportQueue(bus, Spool(context.folder.path / "facts"))
        self._watches = AllocationWatches(bus.bucket(ALLOCATIONS), self._post)
        self._files = JobFiles(
            context.folder,
            context.outputs,
            context.jobs,
            upload=self._workers.upload_output,
            needs=self._core.needs,
        )
        self._ended: asyncio.Future[EndIncarnation] = asyncio.get_running_loop().create_future()

    async def run(self) -> EndIncarnation:
        """Serve the pool until this incarnation ends; return the reason."""
        await self._templates.restore(self._context.packages, self._context.folder)
        instructions = await self._bus.subscribe(
            subjects.instruction(self._hello.host), Instruction, self._on_instruction
        )
        work: tuple[Coroutine[Any, Any, None], ...] = (
            self._watches.run(),
            self._decide(),
            self._tick(),
            self._watch_host(),
            self._watch_fork_server(),
            self._watch_runner(),
            self._prepare_templates(),
            self._reports.publish(),
            self._send_lines(),
            self._files.upload(),
            self._files.remove_unneeded(),
            self._files.remove_deleted(),
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(part) for part in work]
                end = await self._ended
                for task in tasks:
                    task.cancel()
            return end
        finally:
            await self._builds.close()
            if not self._bus.connection.closed.is_set():
                await instructions.unsubscribe()

    async def close(self) -> None:
        """Publish and store what workers left; call this when the fork servers have ended."""
        await self._runner.wait_closed()
        await self._replicas.close()
        self._traces.close()
        await self._send_waiting_lines(MAX_WAITING_LINES)
        if self._bus.is_up:
            await self._reports.flush()
        await self._files.upload_rest()

    def _post(self, event: Event, context: Context | None = None) -> None:
        """Queue an event, to be handled in the trace of ``context``, or else in the current one."""
        self._events.put_nowait((event, get_current() if context is None else context))

    async def _on_instruction(self, received: Received[Instruction]) -> None:
        self._post(received.message.root)

    async def _tick(self) -> None:
        due = time.monotonic()
        while True:
            in_flight = self._replicas.take_in_flight()
            self._post(Tick(self._bus.is_up, num_waiting=self._reports.num_facts, in_flight=in_flight))
            due = max(due + self._beat_seconds, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def _watch_host(self) -> None:
        async for changes in self._bus.bucket(HOSTS).watch(self._hello.host):
            for change in changes:
                if change.value is not None:
                    self._post(change.value)

    async def _watch_fork_server(self) -> None:
        await self._fork_servers.own.ended()
        with suppress(TimeoutError):
            async with asyncio.timeout(EXITS_SECONDS):
                await self._runner.wait_closed()
                await self._events.join()  # the last heartbeat lists the exits
        self._finish(EndIncarnation("the process that starts workers ended"))

    async def _watch_runner(self) -> None:
        await self._runner.fault

    async def _decide(self) -> None:
        while True:
            event, context = await self._events.get()
            commands = self._core.handle(event, now=self._clock.now())
            self._metrics.on_handled(event, commands, num_waiting=self._reports.num_facts)
            self._replicas.follow(event, commands)
            with self._traces.following(event, commands, context):
                for command in commands:
                    await self._carry_out(command)
            self._events.task_done()

    async def _carry_out(self, command: Command) -> None:
        match command:
            case Heartbeat():
                await self._bus.send(subjects.heartbeat(command.host), command)
            case Report(content=PeerSuspected()):
                await self._bus.send(subjects.suspicion(command.job), command)
            case Report():
                self._reports.put(command)
            case AnnounceHost():
                self._reports.put(self._hello)
            case WatchAllocation():
                self._watches.change(command)
            case UnwatchAllocation(job):
                self._watches.change(command)
                self._templates.forget(job)
            case EndIncarnation():
                self._finish(command)
            case _:
                await self._carry_out_on_host(command)

    async def _carry_out_on_host(self, command: HostCommand) -> None:
        match command:
            case PrepareEnvironments(jobs):
                self._builds.prepare(jobs)
            case StartWorker(job, worker):
                logs = self._context.folder.jobs / job
                self._runner.start(job, worker, self._workers.prepare(command), log_folder=logs)
            case SendToWorker(job, worker, message):
                self._runner.send(job, worker, message)
            case KillWorker(job, worker):
                self._runner.kill(job, worker)
            case ForkWorker():
                await self._templates.carry_out(command)
            case PrepareTemplate() | EndTemplate():
                self._template_commands.put_nowait(command)

    async def _prepare_templates(self) -> None:
        """Prepare and end templates beside all other commands: a fork server may take seconds to start."""
        while True:
            await self._templates.carry_out(await self._template_commands.get())

    def _finish(self, end: EndIncarnation) -> None:
        if not self._ended.done():
            self._ended.set_result(end)

    async def _send_lines(self) -> None:
        while True:
            await self._workers.has_lines.wait()
            self._workers.has_lines.clear()
            await self._send_waiting_lines(MAX_BATCHES)
            await asyncio.sleep(LOG_SECONDS)

    async def _send_waiting_lines(self, max_batches: int) -> None:
        """Send up to ``max_batches`` of each worker; one that prints more loses its oldest lines."""
        for (job, worker), waiting in list(self._workers.lines.items()):
            for _ in range(max_batches):
                if not waiting:
                    break
                lines, dropped = waiting.take()
                message = LogLines(
                    job=job,
                    host=self._hello.host,
                    incarnation=self._hello.incarnation,
                    worker=worker,
                    lines=lines,
                    dropped=dropped,
                )
                if not await self._bus.send(subjects.log(job), message):
                    waiting.put_back(lines, dropped)
                    self._workers.has_lines.set()
                    return
            if waiting:
                self._workers.has_lines.set()
            else:
                self._workers.lines.pop((job, worker), None)


class AllocationWatches:
    """Posts each allocation that is watched, with the trace in which it was written.

    Each watch is a task of its own: a host gets the allocations of the jobs that concern it, and no others.
    """

    def __init__(self, bucket: Bucket[Allocation], post: Callable[[Event, Context], None]) -> None:
        self._bucket = bucket
        self._post = post
        self._group = asyncio.TaskGroup()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Run the watches that are begun from now on, until cancelled."""
        async with self._group:
            await asyncio.Event().wait()

    def change(self, command: WatchAllocation | UnwatchAllocation) -> None:
        """Begin or end a watch; after its end, nothing more of it is posted."""
        match command:
            case WatchAllocation(job):
                self._tasks[job] = self._group.create_task(self._watch(job))
            case UnwatchAllocation(job):
                self._tasks.pop(job).cancel()

    async def _watch(self, job: str) -> None:
        async with aclosing(self._bucket.watch(job)) as batches:
            async for changes in batches:
                for change in changes:
                    self._post(change.value or AllocationGone(change.key), context_of(change.headers))
