"""The registry's shell: what arrives goes to the core, and what the core commands is carried out.

- Commands that concern one host are carried out in their order, those of different hosts side by side.
- What agents said is read anew from the event stream at each start, the newest word of each host: what an earlier
  registry heard and did not store is not lost, and what it did store has no effect again.
- A tick follows a round trip to the bus. While the bus is away, or stands still, no host's time runs out; and what
  hosts sent before the answer has arrived by then, however busy this process is.
- A conflict means that another registry writes: this one ends, and reads anew what is stored when it is started again.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

import orjson
from nats.aio.msg import Msg
from pydantic import BaseModel

from resile_shared import subjects
from resile_shared.catalogue import model_of
from resile_shared.envelope import Received, type_of
from resile_shared.messages.commands import Accepted, HostDrain, Refused
from resile_shared.messages.hosts import (
    Heartbeat,
    HostDraining,
    HostGoodbye,
    HostHello,
    HostJoined,
    HostLeft,
    HostLost,
    HostRecord,
)
from resile_shared.messages.message import timestamp
from resile_shared.messages.pool import PoolSettings
from resile_shared.pool_settings import store_pool_settings
from resile_shared.service import ServiceContext
from resile_shared.subjects import EVENTS, GOODBYES, HELLOS, HOSTS

from .core import (
    Announcement,
    Command,
    DrainRequested,
    Event,
    HeartbeatReceived,
    HostsLoaded,
    Publish,
    Registry,
    Reply,
    StoreHost,
    Tick,
)
from .settings import RegistrySettings

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
MAX_UNDER_WAY = 32

_HEARTBEAT = type_of(Heartbeat)
_WHAT = {HostJoined: "joined", HostDraining: "draining", HostLost: "lost", HostLeft: "left"}


async def run(context: ServiceContext[RegistrySettings]) -> None:
    """Keep the records of all hosts, until cancelled. Raises ConflictError when another registry does."""
    await store_pool_settings(context.bus, PoolSettings(detection_seconds=context.settings.detection_seconds))
    async with asyncio.TaskGroup() as group:
        await _Service(context, group).start()


class _Lanes:
    """Carries out commands, one lane for each host."""

    def __init__(self, carry_out: Callable[[Command], Awaitable[None]], group: asyncio.TaskGroup) -> None:
        self._carry_out = carry_out
        self._group = group
        self._room = asyncio.Semaphore(MAX_UNDER_WAY)
        self._lanes: dict[str, deque[Command]] = {}

    def put(self, host: str, command: Command) -> None:
        """Have ``command`` carried out after those that concern ``host`` already."""
        if host in self._lanes:
            self._lanes[host].append(command)
        else:
            self._lanes[host] = deque((command,))
            self._group.create_task(self._empty(host))

    async def _empty(self, host: str) -> None:
        lane = self._lanes[host]
        while lane:
            async with self._room:
                await self._carry_out(lane.popleft())
        del self._lanes[host]


class _Service:
    def __init__(self, context: ServiceContext[RegistrySettings], group: asyncio.TaskGroup) -> None:
        self._context = context
        self._bus = context.bus
        self._hosts = context.bus.bucket(HOSTS)
        self._revisions: dict[str, int] = {}
        self._core = Registry(detection_seconds=context.settings.detection_seconds, tick_seconds=TICK_SECONDS)
        self._group = group
        self._lanes = _Lanes(self._carry_out, group)
        self._answers: dict[str, asyncio.Future[Accepted | Refused]] = {}

    async def start(self) -> None:
        stored = await self._hosts.entries()
        self._revisions = {name: entry.revision for name, entry in stored.items()}
        self._tell(HostsLoaded(tuple(entry.value for entry in stored.values())))
        await self._bus.answer(subjects.HOST_COMMANDS, model_of, self._asked)
        await self._bus.subscribe(subjects.HEARTBEATS, Heartbeat, self._beat, fast_path=self._beat_at_a_glance)
        self._group.create_task(self._listen())
        self._group.create_task(self._tick())
        self._context.is_ready = True
        logger.info("%s hosts are stored", len(stored))

    # events

    async def _listen(self) -> None:
        await self._bus.follow(EVENTS, model_of, self._said, subjects=(HELLOS, GOODBYES), start="last_per_subject")

    async def _said(self, received: Received[BaseModel]) -> None:
        assert isinstance(received.message, HostHello | HostGoodbye)
        self._tell(received.message)

    async def _beat(self, received: Received[Heartbeat]) -> None:
        self._tell(HeartbeatReceived(received.message.host, received.message.incarnation))

    def _beat_at_a_glance(self, message: Msg) -> bool:
        """Take a heartbeat in without reading it whole: thousands come each second."""
        if not message.headers or message.headers.get("ce-type") != _HEARTBEAT:
            return False
        try:
            body = orjson.loads(message.data)
        except orjson.JSONDecodeError:
            return False
        match body:
            case {"host": str(host), "incarnation": int(incarnation)}:
                self._tell(HeartbeatReceived(host, incarnation))
                return True
        return False

    async def _asked(self, received: Received[BaseModel]) -> Accepted | Refused:
        assert isinstance(received.message, HostDrain)
        answer: asyncio.Future[Accepted | Refused] = asyncio.get_running_loop().create_future()
        self._answers[received.id] = answer
        try:
            self._tell(DrainRequested(received.id, received.message), about=received.message.host_id)
            return await answer
        finally:
            del self._answers[received.id]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await self._bus.round_trip()
            self._tell(Tick())

    def _tell(self, event: Event, *, about: str = "") -> None:
        for command in self._core.handle(event, now=time.time()):
            self._lanes.put(about or _host_of(command), command)

    # commands

    async def _carry_out(self, command: Command) -> None:
        match command:
            case StoreHost(record):
                await self._store(record)
            case Publish(event):
                await self._announce(event)
            case Reply(asked, answer):
                self._answers[asked].set_result(answer)

    async def _announce(self, event: Announcement) -> None:
        what = _WHAT[type(event)]
        logger.info("%s %s: %s", event.host, what, event.reason)
        message_id = f"{event.host}/{event.incarnation}/{what}/{timestamp(event.time)}"
        await self._bus.publish(subjects.host_event(event.host, what), event, message_id=message_id)

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
        case Publish(event):
            return event.host
        case Reply(asked, _):
            raise AssertionError(f"the answer to {asked} has no host of its own")
