"""The asyncio shell of the registry: passes messages to the core, and carries out its commands.

- Commands for one host are carried out in order, those for different hosts concurrently.
- At each start the newest hello or goodbye of each host is read again from the event stream: what an earlier registry
  received and did not store is not lost, and what it did store has no effect again.
- A tick follows a round trip to the bus. While NATS is disconnected or frozen, no host times out; and all heartbeats
  sent before the answer have arrived by then, however busy this process is.
- A conflict means that another registry writes: this one exits, and reads the stored state after its restart.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import orjson
from nats.aio.msg import Msg
from opentelemetry.context import Context, get_current
from pydantic import BaseModel

from resile_shared.bus import subjects
from resile_shared.bus.catalogue import model_of
from resile_shared.bus.envelope import Received, type_of
from resile_shared.bus.subjects import EVENTS, GOODBYES, HELLOS, HOSTS
from resile_shared.clock import SteadyClock
from resile_shared.messages.commands import Accepted, HostDrain, HostUndrain, Refused
from resile_shared.messages.hosts import (
    Heartbeat,
    HostDraining,
    HostGoodbye,
    HostHello,
    HostJoined,
    HostLeft,
    HostLost,
    HostRecord,
    HostState,
    ProbeFailed,
)
from resile_shared.messages.message import timestamp
from resile_shared.pool_settings import store_pool_settings
from resile_shared.service import ServiceContext
from resile_shared.telemetry.loss_traces import LOSS_DETECTIONS, LossTraces
from resile_shared.telemetry.metrics import gauge, histogram, total
from resile_shared.telemetry.trace_ids import of_failure
from resile_shared.telemetry.traces import Value, fail, resumed, traced

from .core import (
    Announcement,
    Command,
    Event,
    HeartbeatReceived,
    HostChangeRequested,
    HostsLoaded,
    Publish,
    Registry,
    RemoveHost,
    Reply,
    StoreHost,
    Tick,
)
from .settings import RegistrySettings

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
MAX_CONCURRENT = 32

_HEARTBEAT = type_of(Heartbeat)
_WHAT = {HostJoined: "joined", HostDraining: "draining", HostLost: "lost", HostLeft: "left"}
REMOVAL, UPDATE = "remove hosts", "update hosts"
TIMED_NAMES = (*(f"host {what}" for what in _WHAT.values()), REMOVAL, UPDATE)
"""The names of the spans of decisions upon the time."""


async def run(context: ServiceContext[RegistrySettings]) -> None:
    """Keep the records of all hosts, until cancelled. Raises ConflictError when another registry does."""
    await store_pool_settings(context.bus, context.settings.pool)
    async with asyncio.TaskGroup() as group:
        await _Service(context, group).start()


class _HostQueues:
    """Carries out commands, with one queue for each host."""

    def __init__(self, carry_out: Callable[[Command], Awaitable[None]], group: asyncio.TaskGroup) -> None:
        self._carry_out = carry_out
        self._group = group
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._queues: dict[str, deque[tuple[Command, Context]]] = {}

    def put(self, host: str, command: Command) -> None:
        """Carry out ``command`` after the earlier ones for ``host``, in the current trace."""
        if host in self._queues:
            self._queues[host].append((command, get_current()))
        else:
            self._queues[host] = deque(((command, get_current()),))
            self._group.create_task(self._drain_queue(host))

    async def _drain_queue(self, host: str) -> None:
        queue = self._queues[host]
        while queue:
            async with self._slots:
                command, context = queue.popleft()
                with resumed(context):
                    await self._carry_out(command)
        del self._queues[host]


class _Service:
    def __init__(self, context: ServiceContext[RegistrySettings], group: asyncio.TaskGroup) -> None:
        self._context = context
        self._bus = context.bus
        self._hosts = context.bus.bucket(HOSTS)
        self._revisions: dict[str, int] = {}
        self._clock = SteadyClock()
        self._core = Registry(
            detection_seconds=context.settings.detection_seconds,
            keep_days=context.settings.keep_days,
            tick_seconds=TICK_SECONDS,
        )
        self._group = group
        self._queues = _HostQueues(self._carry_out, group)
        self._answers: dict[str, asyncio.Future[Accepted | Refused]] = {}
        self._losses = LossTraces(seconds=LOSS_DETECTIONS * context.settings.detection_seconds)
        self._num_heartbeats = 0
        self._measure()

    def _measure(self) -> None:
        meter = self._context.meter
        gauge(meter, "resile_hosts", self._hosts_by_state, "Hosts by state.", label="state")
        gauge(meter, "resile_host_slots", self._slots_by_state, "Slots, by the state of their host.", label="state")
        total(meter, "resile_heartbeats", lambda: self._num_heartbeats, "Heartbeats of hosts.")
        self._announced = meter.create_counter(
            "resile_host_changes", description="Hosts that joined, left or were lost."
        )
        self._round_trip = histogram(meter, "resile_bus_round_trip", "Time in which the bus answers the registry.")

    def _hosts_by_state(self) -> Mapping[str, float]:
        counts = Counter(host.state for host in self._core.hosts.values())
        return {state: counts[state] for state in HostState}

    def _slots_by_state(self) -> Mapping[str, float]:
        hosts = self._core.hosts.values()
        return {state: sum(len(host.slots) for host in hosts if host.state is state) for state in HostState}

    async def start(self) -> None:
        stored = await self._hosts.entries()
        self._revisions = {name: entry.revision for name, entry in stored.items()}
        self._handle(HostsLoaded(tuple(entry.value for entry in stored.values())))
        await self._bus.answer(subjects.HOST_COMMANDS, model_of, self._on_command)
        await self._bus.subscribe(subjects.HEARTBEATS, Heartbeat, self._on_heartbeat, fast_path=self._on_raw_heartbeat)
        await self._bus.subscribe(subjects.PROBES, ProbeFailed, self._on_probe_failed)
        self._group.create_task(self._follow_host_events())
        self._group.create_task(self._tick())
        self._context.is_ready = True
        logger.info("registry started hosts=%d", len(stored))

    # events

    async def _follow_host_events(self) -> None:
        await self._bus.follow(
            EVENTS, model_of, self._on_host_event, subjects=(HELLOS, GOODBYES), start="last_per_subject"
        )

    async def _on_host_event(self, received: Received[BaseModel]) -> None:
        assert isinstance(received.message, HostHello | HostGoodbye)
        self._handle(received.message)

    async def _on_heartbeat(self, received: Received[Heartbeat]) -> None:
        self._handle(HeartbeatReceived(received.message.host, received.message.incarnation))

    def _on_raw_heartbeat(self, message: Msg) -> bool:
        """Handle a heartbeat without validating it: there are thousands each second."""
        if not message.headers or message.headers.get("ce-type") != _HEARTBEAT:
            return False
        try:
            body = orjson.loads(message.data)
        except orjson.JSONDecodeError:
            return False
        match body:
            case {"host": str(host), "incarnation": int(incarnation)}:
                self._handle(HeartbeatReceived(host, incarnation))
                return True
        return False

    async def _on_probe_failed(self, received: Received[ProbeFailed]) -> None:
        self._losses.add(received.message.host, now=self._clock.now())

    async def _on_command(self, received: Received[BaseModel]) -> Accepted | Refused:
        assert isinstance(received.message, HostDrain | HostUndrain)
        answer: asyncio.Future[Accepted | Refused] = asyncio.get_running_loop().create_future()
        self._answers[received.id] = answer
        try:
            self._handle(HostChangeRequested(received.id, received.message), about=received.message.host_id)
            return await answer
        finally:
            del self._answers[received.id]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            begun = time.perf_counter()
            await self._bus.round_trip()
            self._round_trip.record(time.perf_counter() - begun)
            self._handle(Tick())

    def _handle(self, event: Event, *, about: str = "") -> None:
        self._num_heartbeats += isinstance(event, HeartbeatReceived)
        now = self._clock.now()
        commands = self._core.handle(event, now=now)
        with self._traced(event, commands, now=now) if commands else nullcontext():
            for command in commands:
                self._queues.put(about or _host_of(command), command)

    @contextmanager
    def _traced(self, event: Event, commands: Sequence[Command], *, now: float) -> Iterator[None]:
        """Put a span around what a decision leads to; the loss of a host has its own name."""
        lost = [c.event for c in commands if isinstance(c, Publish) and isinstance(c.event, HostLost)]
        if not lost:
            with traced(_name_of(event, commands), _about(commands)):
                yield
            return
        known = self._losses.of([each.host for each in lost], now=now)
        with resumed(known or of_failure()), traced("host lost", _about(commands)) as span:
            fail(span, "host lost", "; ".join(f"{each.host}: {each.reason}" for each in lost))
            yield

    # commands

    async def _carry_out(self, command: Command) -> None:
        match command:
            case StoreHost(record):
                await self._store(record)
            case RemoveHost(host):
                await self._remove(host)
            case Publish(event):
                await self._announce(event)
            case Reply(asked, answer):
                self._answers[asked].set_result(answer)

    async def _announce(self, event: Announcement) -> None:
        what = _WHAT[type(event)]
        self._announced.add(1, {"change": what})
        logger.info("host %s host=%s incarnation=%d reason=%r", what, event.host, event.incarnation, event.reason)
        message_id = f"{event.host}/{event.incarnation}/{what}/{timestamp(event.time)}"
        await self._bus.publish(subjects.host_event(event.host, what), event, message_id=message_id)

    async def _remove(self, host: str) -> None:
        """Remove the events first: a hello without a record would make the host join."""
        logger.info("host removed host=%s", host)
        await self._bus.purge(EVENTS.name, subjects.host_subjects(host))
        await self._hosts.delete(host, revision=self._revisions.pop(host))

    async def _store(self, record: HostRecord) -> None:
        known = self._revisions.get(record.host)
        if known is None:
            self._revisions[record.host] = await self._hosts.create(record.host, record)
        else:
            self._revisions[record.host] = await self._hosts.update(record.host, record, revision=known)


def _host_of(command: Command) -> str:
    match command:
        case StoreHost(record):
            return record.host
        case RemoveHost(host):
            return host
        case Publish(event):
            return event.host
        case Reply(asked, _):
            raise AssertionError(f"the answer to {asked} has no host of its own")


def _name_of(event: Event, commands: Sequence[Command]) -> str:
    """Return the name of a decision: by the message that it is upon, or by what time leads to."""
    if not isinstance(event, Tick | HeartbeatReceived):
        return f"decide upon {type(event).__name__}"
    announced = [_WHAT[type(command.event)] for command in commands if isinstance(command, Publish)]
    if announced:
        return f"host {announced[0]}"
    return REMOVAL if any(isinstance(command, RemoveHost) for command in commands) else UPDATE


def _about(commands: Sequence[Command]) -> dict[str, Value]:
    hosts = list(dict.fromkeys(_host_of(command) for command in commands if not isinstance(command, Reply)))
    return {"host" if len(hosts) == 1 else "hosts": ",".join(hosts)} if hosts else {}
