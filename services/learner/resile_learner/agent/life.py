"""One incarnation of an agent: the asyncio shell around its core, from its hello to the end of its last worker."""

import asyncio
import logging
import shutil
import time
from collections.abc import Coroutine
from typing import Any

from opentelemetry.context import Context, get_current

from resile_shared import subjects
from resile_shared.bus import Bus
from resile_shared.envelope import Received
from resile_shared.messages.hosts import Heartbeat, HostHello
from resile_shared.messages.instructions import Instruction
from resile_shared.messages.logs import LogLines
from resile_shared.messages.reports import Report
from resile_shared.subjects import ALLOCATIONS, HOSTS
from resile_shared.telemetry import context_of

from ..processes.client import ForkServerClient
from .core import AgentCore
from .events import AllocationGone, Command, End, Event, Kill, SayHello, Send, Start, Tick
from .logs import MAX_WAITING_LINES
from .processes import Place, Processes
from .reporting import Outgoing
from .spool import Spool
from .traces import Traces

logger = logging.getLogger(__name__)

LOG_SECONDS = 0.1
MAX_BATCHES = 5
OUTPUT_SECONDS = 5.0


class Life:
    """One incarnation. `run` it once, and `close` it when its fork server has ended."""

    def __init__(self, bus: Bus, hello: HostHello, place: Place, fork_server: ForkServerClient) -> None:
        self._bus = bus
        self._hello = hello
        self._place = place
        self._fork_server = fork_server
        self._beat_seconds = place.pool.beat_seconds
        self._core = AgentCore(hello.host, hello.incarnation)
        self._events: asyncio.Queue[tuple[Event, Context]] = asyncio.Queue()
        self._traces = Traces()
        self._processes = Processes(fork_server, place, self._post)
        self._outgoing = Outgoing(bus, Spool(place.folder.path / "facts"))
        self._is_informed = False
        """Whether all allocations that were stored are known."""
        self._over: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    async def run(self) -> End:
        """Serve the pool until this incarnation is over; tell why."""
        instructions = await self._bus.subscribe(
            subjects.instruction(self._hello.host), Instruction, self._take_instruction
        )
        work: tuple[Coroutine[Any, Any, None], ...] = (
            self._decide(),
            self._tick(),
            self._watch_allocations(),
            self._watch_host(),
            self._watch_fork_server(),
            self._watch_processes(),
            self._outgoing.publish(),
            self._send_lines(),
            self._upload_outputs(),
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(part) for part in work]
                end = await self._over
                for task in tasks:
                    task.cancel()
            return end
        finally:
            if not self._bus.connection.closed.is_set():
                await instructions.unsubscribe()

    async def close(self) -> None:
        """See to what workers leave, when all are gone."""
        await self._processes.ended()
        await self._send_waiting_lines(MAX_WAITING_LINES)
        if self._bus.is_up:
            await self._outgoing.flush()
        for job in self._place.folder.jobs_with_output():
            await self._processes.upload_output(job)

    # events in

    def _post(self, event: Event, context: Context | None = None) -> None:
        """Have an event handled: in the trace of ``context``, or else in the present one."""
        self._events.put_nowait((event, get_current() if context is None else context))

    async def _take_instruction(self, received: Received[Instruction]) -> None:
        self._post(received.message.root)

    async def _tick(self) -> None:
        due = time.monotonic()
        while True:
            self._post(Tick(self._bus.is_up))
            due = max(due + self._beat_seconds, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def _watch_allocations(self) -> None:
        async for changes in self._bus.bucket(ALLOCATIONS).watch():
            for change in changes:
                self._post(change.value or AllocationGone(change.key), context_of(change.headers))
            self._is_informed = True

    async def _watch_host(self) -> None:
        async for changes in self._bus.bucket(HOSTS).watch(self._hello.host):
            for change in changes:
                if change.value is not None:
                    self._post(change.value)

    async def _watch_fork_server(self) -> None:
        await self._fork_server.ended()
        self._finish(End("the process that starts workers ended"))

    async def _watch_processes(self) -> None:
        await self._processes.fault

    # commands out

    async def _decide(self) -> None:
        while True:
            event, context = await self._events.get()
            commands = self._core.handle(event, now=time.time())
            with self._traces.following(event, commands, context):
                for command in commands:
                    await self._carry_out(command)

    async def _carry_out(self, command: Command) -> None:
        match command:
            case Heartbeat():
                await self._bus.send(subjects.heartbeat(command.host), command)
            case Report():
                self._outgoing.put(command)
            case SayHello():
                self._outgoing.put(self._hello)
            case Start():
                self._processes.start(command)
            case Send(job, worker, message):
                self._processes.send(job, worker, message)
            case Kill(job, worker):
                self._processes.kill(job, worker)
            case End():
                self._finish(command)

    def _finish(self, end: End) -> None:
        if not self._over.done():
            self._over.set_result(end)

    # what workers print and write

    async def _send_lines(self) -> None:
        while True:
            await self._processes.has_lines.wait()
            self._processes.has_lines.clear()
            await self._send_waiting_lines(MAX_BATCHES)
            await asyncio.sleep(LOG_SECONDS)

    async def _send_waiting_lines(self, max_batches: int) -> None:
        """Send up to so many batches of each worker; whoever prints more loses its oldest lines in the end."""
        for (job, worker), waiting in list(self._processes.lines.items()):
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
                    self._processes.has_lines.set()
                    return
            if waiting:
                self._processes.has_lines.set()
            else:
                self._processes.lines.pop((job, worker), None)

    async def _upload_outputs(self) -> None:
        """Upload what has changed, and clear up what belongs to jobs that are over here."""
        folder = self._place.folder
        while True:
            await asyncio.sleep(OUTPUT_SECONDS)
            for job in folder.jobs_with_output():
                is_over = self._is_informed and not self._core.needs(job)
                is_stored = await self._processes.upload_output(job)
                if is_over and is_stored and not self._core.needs(job):
                    await self._clear_up(job)

    async def _clear_up(self, job: str) -> None:
        gone = [self._place.folder.drop_output(job), *self._place.folder.old_jobs()]
        gone += self._place.packages.prune(self._processes.packages)
        self._place.outputs.forget(job)
        for path in gone:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
