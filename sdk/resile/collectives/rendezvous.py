"""The rendezvous: the process by whose address members find each other, and which decides who is a member.

It serves one group at a time. To the cores of scheduler and agents, joined in memory as in `resile run`, each member is
a host of one slot, and the group one job that may have all of them. A member whose connection ends is a host that was
lost; one that asks to leave is a host that is drained.
"""

import asyncio
import hmac
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

from resile_learner.agent import events as agent
from resile_learner.messages import Order, Pause, Stop, Switched, encode
from resile_learner.worker.links import keep_alive
from resile_scheduler.core import events as scheduler
from resile_scheduler.core.core import Scheduler
from resile_shared.clock import SteadyClock
from resile_shared.errors import UsageError
from resile_shared.messages.hosts import HostHello, HostRecord, HostState, Slot
from resile_shared.messages.jobs import JobRecord, JobSpec, JobState
from resile_shared.messages.message import Message, at
from resile_shared.version import VERSION

from ..local.in_memory import Command, Event, HostCommand, HostEvent, HostFailed, InMemoryPool, StartTimer
from .messages import MAX_MEMBERS, GroupEnded, Hello, LeaveRequested, Rejected, Waiting, Welcome, from_member

HELLO_SECONDS = 10.0
LINGER_SECONDS = 60.0
TICK_SECONDS = 1.0
MAX_LINE_BYTES = 4 << 20
MAX_CONNECTIONS = 4096
GROUP = "group"
OTHER_TOKEN = "it has another token than the rendezvous: pass the same token to join() and to the rendezvous"


@dataclass(frozen=True)
class RendezvousSettings:
    """How a rendezvous serves: after ``detection_seconds`` of silence a member is lost; ``token`` admits processes."""

    detection_seconds: float = 3.0
    token: str = ""


class Connection:
    """One process that asked to become a member."""

    def __init__(self, number: int, hello: Hello, writer: asyncio.StreamWriter) -> None:
        self.host = f"member-{number}"
        self.hello = hello
        self.worker: int | None = None
        """The id of the process as a worker, once it has one."""
        self.is_leaving = False
        """Whether the member leaves of its own accord."""
        self._writer = writer
        self._is_stopped = False

    def send(self, message: Message) -> None:
        """Send ``message``, unless the process is gone or is no longer a member."""
        if not self._writer.is_closing() and not self._is_stopped:
            self._writer.write(encode(message))

    def close(self) -> None:
        """Close the connection; what was sent still goes out."""
        self._writer.close()

    def stop(self) -> None:
        """Tell the process that it is no longer a member; its connection stays open for at most `LINGER_SECONDS`.

        A process that was frozen may send before it reads: an answer that the connection is closed would lose the rest.
        """
        self.send(Stop())
        if not self._writer.is_closing() and not self._is_stopped:
            self._is_stopped = True
            with suppress(OSError):
                self._writer.write_eof()
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._writer.close)

    @property
    def host_hello(self) -> HostHello:
        """The member as a host of one slot."""
        slots = (Slot(index=0),)
        return HostHello(
            host=self.host, incarnation=1, address="127.0.0.1", slots=slots, device_class="any", version=VERSION
        )


class RendezvousServer:
    """The asyncio shell around the pool in memory."""

    def __init__(self, settings: RendezvousSettings) -> None:
        self._settings = settings
        self._clock = SteadyClock()
        self._connections: dict[str, Connection] = {}
        """The connections of all processes that are members of the current group, or may become members, by host."""
        self._pool: InMemoryPool | None = None
        """The pool of the current group, once it has started."""
        self._has_orders = False
        """Whether the current group has a generation."""
        self._is_formed = False
        """Whether a member of the current group has reported that a generation took effect."""
        self._numbers = 0
        self._groups = 0
        self._timers: set[asyncio.TimerHandle] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until cancelled."""
        server = await asyncio.start_server(self._on_connection, sock=listener, limit=MAX_LINE_BYTES)
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                for host in list(self._connections) if self._pool else ():
                    self._handle(HostEvent(host, 1, agent.Tick(is_bus_up=True)))
                self._handle(scheduler.Tick())
        finally:
            server.close()
            for connection in self._connections.values():
                connection.close()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # this server ends
            await self._serve_process(reader, writer)

    async def _serve_process(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer.get_extra_info("socket"), seconds=self._settings.detection_seconds)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = Hello.model_validate_json(await reader.readline())
        except (OSError, ValueError, TimeoutError):
            writer.close()  # not a member
            return
        self._numbers += 1
        connection = Connection(self._numbers, hello, writer)
        is_admitted = hmac.compare_digest(hello.token.encode(), self._settings.token.encode())
        if is_admitted and hello.is_member and self._pool is None:
            self._defer_others()
        if reason := self._refusal(hello) if is_admitted else OTHER_TOKEN:
            connection.send(Rejected(reason=reason))
            connection.close()
            return
        if self._is_awaiting_members and not hello.is_member:
            connection.close()  # it asks again
            return
        self._add(connection)
        with suppress(OSError, ValueError):  # a process that sends garbage counts as lost
            while line := await reader.readline():
                self._on_line(connection, line)
        connection.close()
        self._remove(connection)

    @property
    def _is_awaiting_members(self) -> bool:
        """Whether members of a group that lost its rendezvous have come, and the group is not formed again yet."""
        return not self._is_formed and any(other.hello.is_member for other in self._connections.values())

    def _defer_others(self) -> None:
        """Let processes that are not members ask again later: they would bring another state to the start."""
        for host, other in list(self._connections.items()):
            if not other.hello.is_member:
                del self._connections[host]
                other.close()

    def _refusal(self, hello: Hello) -> str:
        """Why a process that is admitted cannot become a member; empty if it can."""
        if len(self._connections) >= min(MAX_CONNECTIONS, MAX_MEMBERS):
            return f"the group has {len(self._connections)} members, the most that are possible"
        if hello.is_member and self._pool is not None:
            return "another group has started here, or this one without it: call join() to become a member"
        first = next(iter(self._connections.values()), None)
        if first is None:
            return ""
        if hello.num_shards != first.hello.num_shards:
            mine, theirs = hello.num_shards or "one for each member", first.hello.num_shards or "one for each member"
            return f"it has another `num_shards` than the group: {mine} instead of {theirs}. Pass the same to join()"
        if self._pool is None and hello.size != first.hello.size:
            return f"it waits for {hello.size} members, and the others for {first.hello.size}: pass the same `size`"
        return ""

    def _add(self, connection: Connection) -> None:
        self._connections[connection.host] = connection
        if self._pool is not None:
            self._handle(connection.host_hello)
            return
        if len(self._connections) < connection.hello.size:
            self._notify_waiting()
            return
        self._start(connection.hello)

    def _notify_waiting(self) -> None:
        for connection in self._connections.values():
            connection.send(Waiting(present=len(self._connections), size=connection.hello.size))

    def _start(self, hello: Hello) -> None:
        """Start a group of all that are here."""
        self._groups += 1
        core = Scheduler(secret=secrets.token_hex(32), detection_seconds=self._settings.detection_seconds)
        self._pool = InMemoryPool(core)
        for connection in list(self._connections.values()):
            self._handle(connection.host_hello)
        spec = JobSpec(name=GROUP, package=GROUP, script=GROUP, max_workers=hello.num_shards or MAX_MEMBERS)
        self._handle(scheduler.JobSubmitted(GROUP, spec, job=f"{GROUP}-{self._groups}"))

    def _on_line(self, connection: Connection, line: bytes) -> None:
        if self._pool is None or connection.host not in self._connections:
            return
        match from_member.validate_json(line):
            case LeaveRequested():
                connection.is_leaving = True
                hello = connection.host_hello.model_dump()
                self._handle(HostRecord(**hello, state=HostState.DRAINING, since=at(self._clock.now())))
            case GroupEnded(members=members):
                for other in self._connections.values():
                    other.is_leaving = other.is_leaving or other.worker in members
                self._end_group()
            case message:
                self._is_formed = self._is_formed or isinstance(message, Switched)
                event = agent.MessageReceived(f"{GROUP}-{self._groups}", message)
                self._handle(HostEvent(connection.host, 1, event))

    def _remove(self, connection: Connection) -> None:
        if self._connections.pop(connection.host, None) is None:
            return
        if self._pool is None:
            self._notify_waiting()
            return
        self._handle(HostFailed(connection.host, "its process has ended, or left at once"))
        if not self._connections:
            self._end_group()

    def _end_group(self) -> None:
        """End the group: all members except those that are leaving join again, and start another group."""
        for connection in self._connections.values():
            if not connection.is_leaving:
                connection.stop()
        self._connections.clear()
        self._pool, self._has_orders, self._is_formed = None, False, False
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _handle(self, event: Event) -> None:
        if self._pool is None:
            return
        for command in self._pool.handle(event, now=self._clock.now()):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case HostCommand(host, _, what) if connection := self._connections.get(host):
                self._command_member(connection, what)
            case StartTimer(seconds, event):
                self._start_timer(seconds, event)
            case scheduler.StoreJob(record):
                self._on_record(record)

    def _on_record(self, record: JobRecord) -> None:
        """Stop all members if none has the state of the group any longer: those that are left join again."""
        has_started = self._has_orders
        self._has_orders = record.state not in (JobState.ACCEPTED, JobState.QUEUED)
        if has_started and not (self._has_orders and not record.state.is_final):
            for connection in self._connections.values():
                connection.is_leaving = False  # nobody is left who could confirm that it has left
            self._end_group()

    def _start_timer(self, seconds: float, event: scheduler.Event) -> None:
        def fire() -> None:
            self._timers.discard(timer)
            self._handle(event)

        timer = asyncio.get_running_loop().call_later(seconds, fire)
        self._timers.add(timer)

    def _command_member(self, connection: Connection, command: agent.HostCommand) -> None:
        match command:
            case agent.StartWorker(job, worker):
                connection.worker = worker
                connection.send(Welcome(group=job, worker=worker, detection_seconds=self._settings.detection_seconds))
            case agent.SendToWorker(_, _, message):
                assert isinstance(message, Order | Pause)
                connection.send(message)
            case agent.KillWorker():
                connection.stop()
                asyncio.get_running_loop().call_soon(self._remove, connection)


class Rendezvous:
    """A rendezvous that a thread of this process serves until `close`. Also a context manager."""

    def __init__(self, listener: socket.socket, settings: RendezvousSettings) -> None:
        host, port = listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        """The address that members pass to `join`."""
        self._loop = asyncio.new_event_loop()
        self._server = RendezvousServer(settings)
        self._task: asyncio.Task[None] | None = None
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="resile-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. The group goes on, and its membership can no longer change."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def wait(self) -> None:
        """Block until `close` is called."""
        self._thread.join()

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        self._task = asyncio.current_task()
        try:
            await self._server.serve(self._listener)
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


def serve(address: str = "127.0.0.1:0", *, detection_seconds: float = 3.0, token: str = "") -> Rendezvous:
    """Serve a rendezvous on ``address`` ("host:port", port 0: a free one) in a thread of this process.

    Processes that do not know ``token`` are refused; without one, any process that reaches the address may join. A
    member that is silent for ``detection_seconds`` is removed. Raises UsageError if the address cannot be listened on.
    """
    if not detection_seconds > 0:
        raise UsageError(f"detection_seconds is {detection_seconds:g}: it must be above 0")
    host, port = parse_address(address)
    try:
        listener = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise UsageError(f"the rendezvous cannot listen on {address}: {error}") from error
    return Rendezvous(listener, RendezvousSettings(detection_seconds, token))


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port". Raises UsageError if it is something else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f'{address!r} is no address: pass "host:port", as in "10.0.0.1:29400"')
    return host, int(port)
