"""The bus as a service sees it.

    send / subscribe    state that is repeated anyway, at most once, never waited for: heartbeats, logs
    publish / follow    events, stored before `publish` returns, handled at least once and with effect once
    replay              what a stream holds, for whoever only looks at it
    ask / answer        requests: the same request has its effect once, and the same answer each time
    bucket              key-value records with compare-and-set

A message that cannot be read, or that its handler cannot digest, goes to the dead letters with the reason; a request is
told so. Neither stops a service. Everything but `send` waits for a bus that is away; to give up, use `asyncio.timeout`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from pydantic import BaseModel

from . import subjects
from .buckets import Bucket
from .connection import BusRefused, Connection
from .credentials import Credentials
from .delivery import Delivery
from .envelope import Received, decode, encode, headers_for
from .messages.commands import Accepted, Answer, Refused
from .pull import Begin, Reader
from .replay import Replay
from .roles import ROLES, Role
from .streams import provision
from .subjects import Keys, Stream
from .telemetry import traced

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[Received[M]], Awaitable[None]]
Answerer = Callable[[Received[M]], Awaitable[Accepted | Refused]]
MAX_DELIVERIES = 5
RETRY_SECONDS = 1.0


class Bus:
    """One service's connection to the bus. Made by `open`."""

    def __init__(self, connection: Connection, *, service: str, role: Role) -> None:
        self.connection = connection
        self.service = service
        self._role = role
        self.num_not_sent = 0
        """Messages that `send` dropped while the bus was away."""

    @classmethod
    async def open(cls, credentials: Credentials, *, service: str) -> "Bus":
        """Enter the bus; return when its streams and buckets are there. Raises BusRefused."""
        role = ROLES.get(credentials.user)
        if role is None:
            raise BusRefused(f"there is no role {credentials.user!r}: the roles are {', '.join(ROLES)}")
        connection = await Connection.open(credentials, name=service)
        await provision(connection, role)
        return cls(connection, service=service, role=role)

    @property
    def is_up(self) -> bool:
        """Whether the bus can be reached now, as far as is known."""
        return self.connection.is_up

    async def close(self) -> None:
        """Hand over what is under way, and leave."""
        await self.connection.close()

    async def round_trip(self) -> None:
        """Return when the bus has answered: it is there now, and what it sent before has arrived."""
        stream = next((stream.name for stream in self._role.follows), subjects.HOSTS.stream)
        await self.connection.request(f"$JS.API.STREAM.INFO.{stream}", b"")

    def bucket(self, keys: Keys[M]) -> Bucket[M]:
        """Return a key-value bucket."""
        return Bucket(self.connection, keys)

    def replay(
        self, stream: Stream, model: type[M] | Callable[[str], type[M]], *, subject: str | None = None
    ) -> Replay[M]:
        """Return a reader of what ``stream`` holds on ``subject``, by default on all; ``model`` as in `follow`."""
        return Replay(self.connection, stream.name, model, subject)

    async def send(self, subject: str, message: BaseModel) -> bool:
        """Send at most once, now or never: returns False, and drops it, while the bus is away."""
        headers = headers_for(message, source=self.service)
        sent = await self.connection.send(subject, encode(message), headers=headers)
        self.num_not_sent += not sent
        return sent

    async def send_to_listener(self, subject: str, message: BaseModel, *, seconds: float) -> bool:
        """Send at most once, and leave a listener ``seconds`` to act; returns False at once when there is none."""
        headers = headers_for(message, source=self.service)
        return await self.connection.send_to_listener(subject, encode(message), headers=headers, seconds=seconds)

    async def publish(self, subject: str, message: BaseModel, *, message_id: str | None = None) -> None:
        """Publish an event; return when it is stored. The same ``message_id`` is stored once."""
        with traced(f"publish {subject}"):
            headers = headers_for(message, source=self.service, message_id=message_id)
            headers["Nats-Msg-Id"] = headers["ce-id"]
            await self.connection.request_store(subject, encode(message), headers=headers)

    async def ask(self, subject: str, request: BaseModel, *, message_id: str | None = None) -> Accepted | Refused:
        """Send a command; return its answer. Waits until somebody answers."""
        with traced(f"ask {subject}"):
            headers = headers_for(request, source=self.service, message_id=message_id)
            reply = await self.connection.request(subject, encode(request), headers=headers)
            return decode(Answer, subject=subject, headers=reply.headers, body=reply.data).message.root

    async def subscribe(
        self, subject: str, model: type[M], handler: Handler[M], *, shortcut: Callable[[Msg], bool] | None = None
    ) -> Subscription:
        """Have ``handler`` called for each message as it comes, one after the other.

        For floods of repeated state: ``shortcut`` may deal with a message itself, and returns whether it has. What it
        has not goes the usual way, so it need not recognise what is wrong.
        """
        delivery = Delivery(model, self.connection, self.service)

        async def receive(message: Msg) -> None:
            if shortcut is None or not shortcut(message):
                await delivery.deliver(message, handler)

        return await self.connection.subscribe(subject, receive)

    async def answer(
        self, subject: str, model: type[M] | Callable[[str], type[M]], handler: Answerer[M]
    ) -> Subscription:
        """Have ``handler`` answer each request. It is called once for each message id while that is remembered.

        ``model`` may be a function of the subject, as in `follow`.
        """
        delivery = Delivery(model, self.connection, self.service)

        async def receive(message: Msg) -> None:
            answer = await delivery.answer(message, handler)
            if message.reply:
                headers = headers_for(answer, source=self.service)
                await self.connection.send(message.reply, encode(answer), headers=headers)

        return await self.connection.subscribe(subject, receive, queue=self.service)

    async def follow(
        self,
        stream: Stream,
        model: type[M] | Callable[[str], type[M]],
        handler: Handler[M],
        *,
        subjects: tuple[str, ...] = (),
        durable: str | None = None,
        start: str = "all",
        after: int = 0,
        caught_up: asyncio.Event | None = None,
    ) -> None:
        """Have ``handler`` called for each stored message, one after the other; never returns.

        With ``durable`` the bus remembers what was handled, and a handler that raises is called again a few times.
        Otherwise the reading starts at ``start`` (``all``, ``new`` or ``last_per_subject``), or after the sequence
        ``after``. ``model`` may be a function of the subject (`resile_shared.catalogue.model_of`). ``caught_up`` is
        set when all that was stored at the start has been handled.
        """
        reader = Reader(self.connection, stream.name, subjects or stream.subjects, durable, start, after)
        delivery = Delivery(model, self.connection, self.service)
        async with aclosing(reader.read()) as items:
            async for item in items:
                if not isinstance(item, Begin):
                    if durable is None:
                        await delivery.deliver(item, handler)
                    elif await delivery.deliver(item, handler, is_last=item.metadata.num_delivered >= MAX_DELIVERIES):
                        await item.ack()
                    else:
                        await item.nak(delay=RETRY_SECONDS)
                if caught_up and reader.num_waiting <= 0:
                    caught_up.set()
