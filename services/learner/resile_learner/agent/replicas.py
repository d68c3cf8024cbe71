"""Passes requests from the bus to the replicas of this host, and their replies back.

A replica takes requests from the first order that names it until one that does not, or until its process ends. What it
has not answered by then is answered for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from pydantic import ValidationError

from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.calls import BadFrame, CallHead, ReplicaHead, ReplyHead, Status, frame, read_frame

from ..messages import Order, ReplicaConfig, WorkerListening
from ..processes.runner import Key
from .events import Command, Event, MessageReceived, SendToWorker, WorkerExited

logger = logging.getLogger(__name__)

QUEUE = "replicas"
WAITING = 16
"""So many requests wait in a replica for each that it computes; it is busy then."""


class HostReplicas:
    """The replicas of one incarnation."""

    def __init__(self, bus: Bus, on_reply: Callable[[Status], None]) -> None:
        self._bus = bus
        self._on_reply = on_reply
        self._configs: dict[Key, ReplicaConfig] = {}
        self._replicas: dict[Key, _Replica] = {}

    def add(self, job: str, worker: int, config: ReplicaConfig) -> None:
        """Expect a replica that is about to start."""
        self._configs[job, worker] = config

    def follow(self, event: Event, commands: Sequence[Command]) -> None:
        """Connect to replicas that orders name, and have those leave that they no longer name."""
        match event:
            case MessageReceived(job, WorkerListening() as address) if config := self._configs.get(
                (job, address.worker)
            ):
                self._replicas[job, address.worker] = _Replica(self._bus, job, config, address, self._on_reply)
            case WorkerExited(job, worker):
                self._configs.pop((job, worker), None)
                self._replicas.pop((job, worker), None)  # it ends with the connection
            case _:
                pass
        for command in commands:
            if isinstance(command, SendToWorker) and isinstance(command.message, Order):
                replica = self._replicas.get((command.job, command.worker))
                if replica is not None:
                    replica.on_order(is_named=command.worker in command.message.workers)

    def take_in_flight(self) -> dict[Key, float]:
        """Return the requests that each replica had, on average since the last call."""
        return {key: replica.waiting.take_mean(time.monotonic()) for key, replica in self._replicas.items()}

    async def close(self) -> None:
        """Take no more requests: the agent ends."""
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))


class WaitingRequests:
    """The requests that a replica has, by their numbers: where the reply goes, and the method."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[str, str]] = {}
        self._seen = self._begun = time.monotonic()
        self._sum = 0.0
        """The number of requests, integrated over the time since `take_mean`."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, number: int, address: str, method: str) -> None:
        """Add a request."""
        self._integrate(time.monotonic())
        self._waiting[number] = address, method

    def pop(self, number: int) -> tuple[str, str] | None:
        """Remove a request that is answered; None if there is none of that number."""
        self._integrate(time.monotonic())
        return self._waiting.pop(number, None)

    def pop_all(self) -> list[tuple[str, str]]:
        """Remove all requests."""
        self._integrate(time.monotonic())
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())

    def take_mean(self, now: float) -> float:
        """Return how many requests there were, on average since the last call."""
        self._integrate(now)
        seconds = now - self._begun
        mean = self._sum / seconds if seconds > 0 else float(len(self._waiting))
        self._begun, self._sum = now, 0.0
        return round(mean, 3)

    def _integrate(self, now: float) -> None:
        self._sum += len(self._waiting) * (now - self._seen)
        self._seen = now


class _Replica:
    """The connection to one replica, and its subscription."""

    def __init__(
        self,
        bus: Bus,
        job: str,
        config: ReplicaConfig,
        address: WorkerListening,
        on_reply: Callable[[Status], None],
    ) -> None:
        self._bus = bus
        self._on_reply = on_reply
        self._job = job
        self._config = config
        self._address = address
        self._is_leaving = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._writer: asyncio.StreamWriter | None = None
        self.waiting = WaitingRequests()
        self._idempotent: tuple[str, ...] = ()
        self._numbers = count(1)
        self._until = 0.0
        """The latest deadline of all requests."""
        self._task: asyncio.Task[None] | None = None

    def on_order(self, *, is_named: bool) -> None:
        """Take requests from the first order that names the replica until one that does not.

        One that was never named waits: a later order may name it, or the scheduler ends it.
        """
        if is_named and self._task is None:
            self._task = asyncio.create_task(self._serve())
        elif not is_named and self._task is not None:
            self._is_leaving.set()

    async def close(self) -> None:
        """End the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _serve(self) -> None:
        try:
            reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        except OSError:
            return  # its process has ended
        requests = await self._bus.connection.subscribe(subjects.call(self._job), self._on_request, queue=QUEUE)
        self._writer = writer
        writer.write(self._config.secret.encode())
        reading = asyncio.create_task(self._read(reader))
        leaving = asyncio.create_task(self._is_leaving.wait())
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await requests.drain()  # type: ignore[no-untyped-call]
            idle = asyncio.create_task(self._is_idle.wait())
            left = max(self._until - time.monotonic(), 0.0)  # nobody waits for its replies any longer
            await asyncio.wait({reading, idle}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
        finally:
            self._writer = None
            for task in (reading, leaving):
                task.cancel()
            with suppress(NatsError):  # drained before, or the bus is closed
                await requests.unsubscribe()
            writer.close()
            await self._answer_rest()

    async def _on_request(self, message: Msg) -> None:
        number = next(self._numbers)
        try:
            head = CallHead.of(message.headers, number=number)
        except BadFrame as error:
            await self._reply(message.reply, ReplyHead(status="invalid"), str(error).encode())
            return
        room = self._config.service.concurrency * (1 + WAITING if head.may_wait else 1)
        if self._writer is None or len(self.waiting) >= room:
            await self._reply(message.reply, ReplyHead(status="busy"), b"it has more requests than it can compute")
            return
        self._until = max(self._until, time.monotonic() + head.seconds)
        self.waiting.put(number, message.reply, head.method)
        self._is_idle.clear()
        self._writer.write(frame(head, message.data))
        with suppress(ConnectionError):  # the reader notices as well
            await self._writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Pass replies on until the replica's process ends, or sends nonsense."""
        try:
            if (hello := await read_frame(reader)) is not None:
                self._idempotent = ReplicaHead.model_validate_json(hello[0]).idempotent
            while (found := await read_frame(reader)) is not None:
                head = ReplyHead.model_validate_json(found[0])
                waiting = self.waiting.pop(head.number)
                if waiting is not None:
                    await self._reply(waiting[0], head, found[1])
                if not self.waiting:
                    self._is_idle.set()
        except (BadFrame, ValidationError) as error:
            logger.warning("replica disconnected job=%s worker=%s: %s", self._job, self._address.worker, error)

    async def _answer_rest(self) -> None:
        for address, method in self.waiting.pop_all():
            lost = ReplyHead(status="lost", is_idempotent=method in self._idempotent)
            await self._reply(address, lost, b"the replica ended before it had answered")

    async def _reply(self, address: str, head: ReplyHead, body: bytes) -> None:
        self._on_reply(head.status)
        await self._bus.connection.send(address, body, headers=head.headers())
