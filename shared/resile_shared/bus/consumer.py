"""A pull consumer of a JetStream stream that survives any outage.

After a reconnect, or when the server sends no idle heartbeats, the consumer is created again, and continues after the
last message that it has yielded. Nothing is acknowledged: a reader that must not miss any stores its position.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import orjson
from nats.aio.msg import Msg

from .connection import Connection

logger = logging.getLogger(__name__)

BATCH = 64
AHEAD = BATCH // 4
"""More messages are requested when this many are still to come, so that a busy reader never waits for a request."""
EXPIRES_SECONDS = 60.0
HEARTBEAT_SECONDS = 5.0
INACTIVE_SECONDS = 60.0
_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class ConsumerCreated:
    """The consumer exists on the server, with this many messages to deliver."""

    num_pending: int


@dataclass
class Consumer:
    """Reads the messages of one stream whose subjects match one of ``filters``."""

    connection: Connection
    stream: str
    filters: tuple[str, ...]
    start: str = "all"
    """Where a new consumer starts: ``all``, ``new`` or ``last_per_subject``."""
    after: int = 0
    """The sequence of the last message yielded, or of the one after which to start."""
    num_waiting: int = 0
    """Messages not yielded yet of those that were stored when the consumer was created."""

    async def read(self) -> AsyncGenerator[ConsumerCreated | Msg, None]:
        """Yield ConsumerCreated, then messages; again whenever the consumer is created again. Never ends."""
        inbox: asyncio.Queue[Msg | None] = asyncio.Queue()

        def wake() -> None:
            inbox.put_nowait(None)

        address = self.connection.new_inbox()
        subscription = await self.connection.subscribe(f"{address}.*", inbox.put)
        self.connection.on_return.add(wake)
        try:
            while True:
                async for item in self._read_one_consumer(inbox, address):
                    yield item
        finally:
            self.connection.on_return.discard(wake)
            if not self.connection.closed.is_set():
                await subscription.unsubscribe()

    async def _read_one_consumer(
        self, inbox: "asyncio.Queue[Msg | None]", address: str
    ) -> AsyncGenerator[ConsumerCreated | Msg, None]:
        name = f"consumer-{secrets.token_hex(8)}"
        created = await self._create(name)
        if self.start == "new" and not self.after:
            self.after = created["delivered"]["stream_seq"]
        self.num_waiting = created["num_pending"]
        yield ConsumerCreated(num_pending=self.num_waiting)
        wanted = 0
        reply = ""
        while True:
            if wanted <= AHEAD:  # an older request that expires leaves at most this many undelivered
                wanted += BATCH
                reply = f"{address}.{secrets.token_hex(8)}"
                await self._request_batch(name, reply)
            try:
                async with asyncio.timeout(2.5 * HEARTBEAT_SECONDS):
                    message = await inbox.get()
            except TimeoutError:
                return
            if message is None:  # reconnected: the server has dropped the request
                return
            status = _status(message)
            if status is None:
                # The previous consumer may still deliver.
                if message.metadata.consumer == name:
                    wanted -= 1
                    self.after = message.metadata.sequence.stream
                    # Messages that a limit of the stream has removed meanwhile never arrive.
                    self.num_waiting = min(self.num_waiting - 1, message.metadata.num_pending)
                    yield message
            elif message.subject == reply and status != "100":  # the newest request has ended
                if status not in ("404", "408"):
                    logger.debug(
                        "creating consumer again stream=%s status=%s headers=%s", self.stream, status, message.headers
                    )
                    await asyncio.sleep(0.1)
                    return
                wanted = 0

    async def _create(self, name: str) -> dict[str, Any]:
        """Create the consumer; return what the server says of it."""
        if self.after:  # a stream that does not wait for the disk may have lost its end with the server's machine
            stream = await self.connection.request_store(f"$JS.API.STREAM.INFO.{self.stream}", b"")
            self.after = min(self.after, stream["state"]["last_seq"])
        return await self.connection.request_store(
            f"$JS.API.CONSUMER.CREATE.{self.stream}.{name}",
            orjson.dumps({"stream_name": self.stream, "config": self._configuration(name)}),
        )

    async def _request_batch(self, name: str, reply: str) -> None:
        request = {
            "batch": BATCH,
            "expires": int(EXPIRES_SECONDS * _NANOSECONDS),
            "idle_heartbeat": int(HEARTBEAT_SECONDS * _NANOSECONDS),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{name}"
        await self.connection.send(subject, orjson.dumps(request), headers={}, reply=reply)

    def _configuration(self, name: str) -> dict[str, Any]:
        configuration: dict[str, Any] = {
            "name": name,
            "filter_subjects": list(self.filters),
            "ack_policy": "none",
            "inactive_threshold": int(INACTIVE_SECONDS * _NANOSECONDS),
            "mem_storage": True,
        }
        if self.after:
            configuration |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self.after + 1}
        else:
            configuration["deliver_policy"] = self.start
        return configuration


def _status(message: Msg) -> str | None:
    """Return the status of a message from the server itself, None for one of the stream."""
    return message.headers.get("Status") if message.headers and not message.reply else None
