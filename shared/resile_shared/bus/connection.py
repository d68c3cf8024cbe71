"""A connection to NATS that always reconnects, and requests that are retried until they are answered.

Nothing here times out: use `asyncio.timeout` to give up.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import orjson
from nats.aio.client import PING_PROTO, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import (
    ConnectionClosedError,
    ConnectionDrainingError,
    MaxPayloadError,
    NoRespondersError,
    OutboundBufferLimitError,
    SlowConsumerError,
)
from nats.errors import Error as NatsError

from ..errors import MessageTooLarge, ResileError
from .credentials import Credentials
from .store_health import StoreHealth

logger = logging.getLogger(__name__)

RESEND_SECONDS = 1.0
PAUSE_SECONDS = 0.1
RECONNECT_SECONDS = 0.25
CANCEL_SECONDS = 0.1
DRAIN_SECONDS = 10.0
_PATIENCE: dict[str, Any] = {
    "max_reconnect_attempts": -1,
    "reconnect_time_wait": RECONNECT_SECONDS,
    "connect_timeout": 2,
    "ping_interval": 5,
    "max_outstanding_pings": 2,
}
_NOT_SENT = (OutboundBufferLimitError, ConnectionClosedError, ConnectionDrainingError)
_INBOX = "_inbox_"
_NOT_PERMITTED = re.compile(r'permissions violation for \w+ to "([^"]+)"', re.IGNORECASE)


class BusRefused(ResileError):
    """NATS rejected the credentials, or the role lacks a permission."""


class BusClosed(ResileError):
    """The connection was closed for good."""

    def __init__(self) -> None:
        super().__init__("the connection to the bus is closed")


class StoreFailed(ResileError):
    """JetStream answered with a permanent error."""

    def __init__(self, subject: str, error: Mapping[str, Any]) -> None:
        super().__init__(f"JetStream refused {subject}: {error.get('description', 'no reason given')}")
        self.code = int(error.get("err_code", 0))


class NatsClient(Client):
    """The client of nats-py with three changes.

    Its parser of headers is faster: its own needed a third of a busy monitor's time. It closes also while it is
    disconnected with messages to send: uvloop raises RuntimeError when they are written to a transport that is closed.
    And a ping follows what was sent before it, so that its answer shows that the server has seen that: its own
    overtakes commands that are pending.
    """

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        transport = self._transport
        if isinstance(transport, TcpTransport) and (writer := transport._io_writer) and writer.is_closing():
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """Parse ``Name: Value`` lines like the method that it replaces, which ignores names that are not tokens."""
        found: dict[str, str] = {}
        for line in raw.decode("utf-8", "replace").split("\r\n"):
            name, colon, value = line.partition(":")
            if colon and name.isascii() and len(token := name.split()) == 1:
                found[token[0]] = value.strip()
        return found


class Connection:
    """A client of nats-server. Made by `open`."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._client = NatsClient()
        self._up = asyncio.Event()
        self._is_leaving = False
        self.denied: set[str] = set()
        """Subjects that this role tried to use but may not; in lower case, as the client library reports them."""
        self.num_dropped = 0
        """Messages that arrived and were dropped, because handlers did not keep up."""
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.store_health = StoreHealth()
        self.closed = asyncio.Event()
        self.on_return: set[Callable[[], None]] = set()
        """Functions to call after each reconnect."""

    @classmethod
    async def open(cls, credentials: Credentials, *, name: str) -> "Connection":
        """Connect; waits until NATS is reachable. Raises BusRefused."""
        connection = cls(credentials)
        connecting = asyncio.ensure_future(connection._connect(name))
        try:
            await asyncio.wait({connecting, connection._refused}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise BusRefused(
                    f"the bus at {credentials.url} rejects the user {credentials.user!r}: check the credentials"
                )
            await connecting
        except BaseException:
            while not connecting.done():  # Python 3.11 drops a cancellation that comes with an answer, in `wait_for`
                connecting.cancel()
                await asyncio.wait({connecting}, timeout=CANCEL_SECONDS)
            with suppress(Exception):  # whatever is wrong with it, it leaves no task behind
                await connection._client.close()
            raise
        finally:
            connection._refused.cancel()
        return connection

    async def _connect(self, name: str) -> None:
        await self._client.connect(
            self._credentials.url,
            user=self._credentials.user,
            password=self._credentials.password,
            name=name,
            inbox_prefix=f"_INBOX_{self._credentials.user}",
            **_PATIENCE,
            error_cb=self._on_error,
            disconnected_cb=self._on_lost,
            reconnected_cb=self._on_return,
            closed_cb=self._on_closed,
        )
        self._up.set()

    @property
    def is_up(self) -> bool:
        """Whether NATS is connected, as far as is known."""
        return self._up.is_set()

    async def close(self) -> None:
        """Send pending messages, and disconnect."""
        self._is_leaving = True
        with suppress(NatsError, TimeoutError):  # NATS has gone meanwhile, or does not answer
            if self._up.is_set():
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self._client.drain()
        await self._client.close()

    async def send(self, subject: str, body: bytes, *, headers: dict[str, str], reply: str = "") -> bool:
        """Send at most once; returns False, and sends nothing, while NATS is disconnected."""
        if not self._up.is_set():
            return False
        try:
            await self._client.publish(subject, body, reply=reply, headers=headers)
        except _NOT_SENT:
            return False
        except MaxPayloadError:
            raise MessageTooLarge(subject, len(body)) from None
        return True

    async def request(self, subject: str, body: bytes, *, headers: dict[str, str] | None = None) -> Msg:
        """Send until a service answers. The request must be idempotent."""
        while True:
            await self._wait_until_up()
            try:
                return await self._request_once(subject, body, headers, seconds=RESEND_SECONDS)
            except (NoRespondersError, OutboundBufferLimitError):
                await asyncio.sleep(PAUSE_SECONDS)
            except (ConnectionClosedError, ConnectionDrainingError):
                raise BusClosed from None
            except MaxPayloadError:
                raise MessageTooLarge(subject, len(body)) from None
            except TimeoutError:
                if subject.lower() in self.denied:
                    raise BusRefused(f"{self._credentials.user!r} is not allowed to publish {subject}") from None

    async def send_to_listener(self, subject: str, body: bytes, *, headers: dict[str, str], seconds: float) -> bool:
        """Send at most once, and wait ``seconds`` for a subscriber to act; returns False at once when there is none."""
        try:
            if self._up.is_set():
                await self._request_once(subject, body, headers, seconds=seconds)
        except NoRespondersError:
            return False
        except TimeoutError:
            return True
        except _NOT_SENT:
            pass
        await asyncio.sleep(seconds)
        return True

    async def request_once(self, subject: str, body: bytes, *, headers: dict[str, str], seconds: float) -> Msg | None:
        """Send at most once; return the reply, or None if nobody listens or no reply comes within ``seconds``."""
        if not self._up.is_set():
            return None
        try:
            return await self._request_once(subject, body, headers, seconds=seconds)
        except (NoRespondersError, TimeoutError, *_NOT_SENT):
            return None

    async def _request_once(self, subject: str, body: bytes, headers: dict[str, str] | None, *, seconds: float) -> Msg:
        """Request. A cancellation that comes with the answer counts, though Python 3.11 drops it in `wait_for`."""
        task = asyncio.current_task()
        assert task is not None
        num_cancellations = task.cancelling()
        reply = await self._client.request(subject, body, timeout=seconds, headers=headers)
        if task.cancelling() > num_cancellations:
            raise asyncio.CancelledError
        return reply

    async def request_many(self, subject: str, body: bytes, *, is_last: Callable[[Msg], bool]) -> list[Msg]:
        """Send a request with several answers, up to the one for which ``is_last`` is true; return all in order.

        The request is sent again, and all answers are awaited again, when no more of them come.
        """
        while True:
            await self._wait_until_up()
            try:
                return await self._request_many_once(subject, body, is_last)
            except (ConnectionClosedError, ConnectionDrainingError):
                raise BusClosed from None
            except TimeoutError:
                if subject.lower() in self.denied:
                    raise BusRefused(f"{self._credentials.user!r} is not allowed to publish {subject}") from None

    async def _request_many_once(self, subject: str, body: bytes, is_last: Callable[[Msg], bool]) -> list[Msg]:
        inbox: asyncio.Queue[Msg] = asyncio.Queue()
        address = self.new_inbox()
        subscription = await self.subscribe(address, inbox.put)
        answers: list[Msg] = []
        try:
            await self.send(subject, body, headers={}, reply=address)
            while not answers or not is_last(answers[-1]):
                async with asyncio.timeout(RESEND_SECONDS):
                    answers.append(await inbox.get())
        finally:
            if not self.closed.is_set():
                await subscription.unsubscribe()
        return answers

    async def request_store(
        self, subject: str, body: bytes, *, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Request something of JetStream; what it cannot do now is tried again. Raises StoreFailed."""
        with self.store_health.writing():
            while True:
                answer: dict[str, Any] = orjson.loads((await self.request(subject, body, headers=headers)).data)
                error = answer.get("error")
                if error is None:
                    self.store_health.on_stored()
                    return answer
                if int(error.get("code", 0)) < 500:
                    raise StoreFailed(subject, error)
                reason = error.get("description", "no reason given")
                logger.warning("JetStream request failed, retrying subject=%s: %s", subject, reason)
                self.store_health.on_refused(reason)
                await asyncio.sleep(RESEND_SECONDS)

    async def subscribe(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]], *, queue: str = ""
    ) -> Subscription:
        """Have ``callback`` called for each message, one after the other, also after reconnects."""
        return await self._client.subscribe(subject, queue=queue, cb=callback)

    def new_inbox(self) -> str:
        """Return a subject on which only this client listens."""
        return self._client.new_inbox()

    async def flush(self) -> None:
        """Return when the server has seen all that was sent."""
        await self._client.flush()

    async def _wait_until_up(self) -> None:
        if not self._up.is_set():
            await self._up.wait()
        if self.closed.is_set():
            raise BusClosed

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if isinstance(error, SlowConsumerError):
            self.num_dropped += 1
            if self.num_dropped.bit_count() == 1:  # at 1, 2, 4, 8, ...
                logger.warning(
                    "handlers too slow, messages dropped total=%s subject=%s", self.num_dropped, error.subject
                )
        elif denied := _NOT_PERMITTED.search(text):
            is_reply = denied[1].lower().startswith(_INBOX) and "for publish to" in text.lower()
            if is_reply:  # the server has forgotten the request, as when it restarts
                logger.info("late reply dropped subject=%s", denied[1])
                return
            self.denied.add(denied[1])
            logger.error("%s", text)
        elif "authorization" in text.lower():
            if not self._refused.done():
                self._refused.set_result(None)
            logger.error("NATS rejected credentials user=%s", self._credentials.user)
        else:
            logger.debug("NATS error: %s", text)

    async def _on_lost(self) -> None:
        if self._up.is_set() and not self._is_leaving:
            logger.warning("NATS disconnected, reconnecting")
        self._up.clear()

    async def _on_return(self) -> None:
        logger.info("NATS reconnected")
        self._up.set()
        for call in tuple(self.on_return):
            call()

    async def _on_closed(self) -> None:
        self.closed.set()
        self._up.set()  # wakes waiters, which find it closed
