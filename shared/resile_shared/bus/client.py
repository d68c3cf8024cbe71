"""The bus as a service sees it.

    send / subscribe    state that is repeated anyway: at most once, never waits (heartbeats, logs)
    publish / follow    events: stored before `publish` returns, delivered at least once, with effect once
    read_stream         the messages of a stream, for readers that do not act on them
    ask / answer        requests: the same request has its effect once, and gets the same answer each time
    query / serve       questions that change nothing: at most once, with a time limit
    bucket              key-value records with compare-and-set

A message that cannot be decoded, or whose handler fails, goes to the dead letters with the reason; a request is also
refused. Neither stops a service. Every call but `send` waits while NATS is disconnected; use `asyncio.timeout` to give
up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import orjson
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from pydantic import BaseModel

from ..errors import MessageTooLarge
from ..messages.commands import Accepted, CommandResponse, Refused
from ..telemetry.traces import publishing
from . import subjects
from .buckets import WRONG_LAST_SEQUENCE, Bucket, ConflictError
from .connection import BusRefused, Connection, StoreFailed
from .consumer import Consumer, ConsumerCreated
from .credentials import Credentials
from .delivery import Delivery
from .envelope import Received, decode, encode, headers_for
from .roles import ROLES, Role
from .stream_reader import StreamReader, newest_message, sequence_of
from .streams import provision
from .subjects import BucketSpec, Stream

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[Received[M]], Awaitable[None]]
Answerer = Callable[[Received[M]], Awaitable[Accepted | Refused]]


class Bus:
    """One service's connection to the bus. Made by `open`."""

    def __init__(self, connection: Connection, *, service: str, role: Role) -> None:
        self.connection = connection
        self.service = service
        self._role = role
        self.num_not_sent = 0
        """Messages that `send` dropped while NATS was disconnected."""

    @classmethod
    async def open(cls, credentials: Credentials, *, service: str) -> "Bus":
        """Connect; return when the streams and buckets exist. Raises BusRefused."""
        role = ROLES.get(credentials.user)
        if role is None:
            raise BusRefused(f"unknown bus user {credentials.user!r}: use the credentials of one of {', '.join(ROLES)}")
        connection = await Connection.open(credentials, name=service)
        await provision(connection, role)
        return cls(connection, service=service, role=role)

    @property
    def is_up(self) -> bool:
        """Whether NATS is connected, as far as is known."""
        return self.connection.is_up

    async def close(self) -> None:
        """Send pending messages, and disconnect."""
        await self.connection.close()

    async def round_trip(self) -> None:
        """Return when the bus has answered: it is connected, and every message it sent before has arrived."""
        stream = next((stream.name for stream in self._role.follows), subjects.HOSTS.stream)
        await self.connection.request(f"$JS.API.STREAM.INFO.{stream}", b"")

    def bucket(self, spec: BucketSpec[M]) -> Bucket[M]:
        """Return a key-value bucket."""
        return Bucket(self.connection, spec)

    def read_stream(
        self, stream: Stream, model: type[M] | Callable[[str], type[M]], *, subject: str | None = None
    ) -> StreamReader[M]:
        """Return a reader of ``stream``, of one ``subject`` or of all; ``model`` as in `follow`."""
        return StreamReader(self.connection, stream.name, model, subject)

    async def send(self, subject: str, message: BaseModel) -> bool:
        """Send at most once; returns False, and drops the message, while NATS is disconnected.

        A message that is too large is dropped, too.
        """
        headers = headers_for(message, source=self.service)
        try:
            sent = await self.connection.send(subject, encode(message), headers=headers)
        except MessageTooLarge as error:
            logger.error("message dropped: %s", error)
            sent = True
        self.num_not_sent += not sent
        return sent

    async def send_to_listener(self, subject: str, message: BaseModel, *, seconds: float) -> bool:
        """Send at most once, and wait ``seconds`` for a subscriber to act; returns False at once when there is none."""
        headers = headers_for(message, source=self.service)
        return await self.connection.send_to_listener(subject, encode(message), headers=headers, seconds=seconds)

    async def publish(self, subject: str, message: BaseModel, *, message_id: str | None = None) -> None:
        """Publish an event; return when it is stored. The same ``message_id`` is stored once."""
        with publishing("publish", subject):
            headers = headers_for(message, source=self.service, message_id=message_id)
            headers["Nats-Msg-Id"] = headers["ce-id"]
            await self.connection.request_store(subject, encode(message), headers=headers)

    async def append(self, stream: Stream, subject: str, message: BaseModel, *, log: str, after: int) -> int:
        """Publish an event to ``stream``, next after the message with the sequence ``after``; return its sequence.

        ``log`` is a subject with a wildcard: ``after`` must be the newest message of all that match it, 0 for none.
        Raises ConflictError otherwise.
        """
        with publishing("publish", subject):
            headers = headers_for(message, source=self.service)
            headers |= {
                "Nats-Msg-Id": headers["ce-id"],
                "Nats-Expected-Last-Subject-Sequence": str(after),
                "Nats-Expected-Last-Subject-Sequence-Subject": log,
            }
            try:
                answer = await self.connection.request_store(subject, encode(message), headers=headers)
            except StoreFailed as error:
                if error.code != WRONG_LAST_SEQUENCE:
                    raise
                # As in `Bucket`: the message may be there although this attempt, the second one, was refused.
                newest = await newest_message(self.connection, stream.name, log)
                if newest is None or (newest.headers or {}).get("Nats-Msg-Id") != headers["ce-id"]:
                    raise ConflictError(stream.name, log, after) from None
                return sequence_of(newest)
            return int(answer["seq"])

    async def purge(self, stream: str, subject: str) -> None:
        """Remove the messages that match ``subject`` from the stream of that name."""
        body = orjson.dumps({"filter": subject})
        await self.connection.request_store(f"$JS.API.STREAM.PURGE.{stream}", body)

    async def last(self, stream: Stream, model: type[M], *, subject: str) -> Received[M] | None:
        """Return the newest message of ``stream`` that matches ``subject``, None without one. Raises Malformed."""
        return await StreamReader(self.connection, stream.name, model, subject).newest()

    async def ask(self, subject: str, request: BaseModel, *, message_id: str | None = None) -> Accepted | Refused:
        """Send a command; return the answer. Waits until a service answers."""
        with publishing("ask", subject):
            headers = headers_for(request, source=self.service, message_id=message_id)
            reply = await self.connection.request(subject, encode(request), headers=headers)
            return decode(CommandResponse, subject=subject, headers=reply.headers, body=reply.data).message.root

    async def subscribe(
        self, subject: str, model: type[M], handler: Handler[M], *, fast_path: Callable[[Msg], bool] | None = None
    ) -> Subscription:
        """Call ``handler`` for each message as it arrives, one at a time.

        For high rates: ``fast_path`` may handle a message undecoded, and returns whether it did. All others are decoded
        and validated, so it does not have to detect invalid messages.
        """
        delivery = Delivery(model, self.connection, self.service)

        async def receive(message: Msg) -> None:
            if fast_path is None or not fast_path(message):
                await delivery.deliver(message, handler)

        return await self.connection.subscribe(subject, receive)

    async def answer(
        self, subject: str, model: type[M] | Callable[[str], type[M]], handler: Answerer[M]
    ) -> Subscription:
        """Call ``handler`` to answer each request, once for each message id among the recent ones.

        ``model`` may be a function of the subject, as in `follow`.
        """
        delivery = Delivery(model, self.connection, self.service)

        async def receive(message: Msg) -> None:
            answer = await delivery.answer(message, handler)
            if message.reply:
                headers = headers_for(answer, source=self.service)
                await self.connection.send(message.reply, encode(answer), headers=headers)

        return await self.connection.subscribe(subject, receive, queue=self.service)

    async def query(self, subject: str, question: BaseModel, model: type[M], *, seconds: float) -> M | None:
        """Send a question once; return the reply, or None if there is none within ``seconds``."""
        headers = headers_for(question, source=self.service)
        reply = await self.connection.request_once(subject, encode(question), headers=headers, seconds=seconds)
        if reply is None:
            return None
        return decode(model, subject=subject, headers=reply.headers, body=reply.data).message

    async def serve(
        self, subject: str, model: type[M], handler: Callable[[Received[M]], Awaitable[BaseModel]]
    ) -> Subscription:
        """Reply to each question with what ``handler`` returns; an invalid one gets no reply."""
        delivery = Delivery(model, self.connection, self.service)

        async def receive(message: Msg) -> None:
            async def reply(question: Received[M]) -> None:
                answer = await handler(question)
                headers = headers_for(answer, source=self.service)
                await self.connection.send(message.reply, encode(answer), headers=headers)

            await delivery.deliver(message, reply)

        return await self.connection.subscribe(subject, receive, queue=self.service)

    async def follow(
        self,
        stream: Stream,
        model: type[M] | Callable[[str], type[M]],
        handler: Handler[M],
        *,
        subjects: tuple[str, ...] = (),
        start: str = "all",
        after: int = 0,
        caught_up: asyncio.Event | None = None,
    ) -> None:
        """Call ``handler`` for each stored message, one at a time; never returns.

        Reading starts at ``start`` (``all``, ``new`` or ``last_per_subject``), or after the sequence ``after``.
        ``model`` may be a function of the subject (`resile_shared.bus.catalogue.model_of`). ``caught_up`` is set when
        every message stored at the start has been handled.
        """
        consumer = Consumer(self.connection, stream.name, subjects or stream.subjects, start, after)
        delivery = Delivery(model, self.connection, self.service)
        async with aclosing(consumer.read()) as items:
            async for item in items:
                if not isinstance(item, ConsumerCreated):
                    await delivery.deliver(item, handler)
                if caught_up and consumer.num_waiting <= 0:
                    caught_up.set()
