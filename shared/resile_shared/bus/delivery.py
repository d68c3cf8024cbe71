"""Delivers messages to handlers: decodes, drops duplicates, traces, and sends failures to the dead letters."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from hashlib import sha256
from typing import Generic, TypeVar

from nats.aio.msg import Msg
from pydantic import BaseModel

from ..messages.commands import ID_REUSED, Accepted, Refused
from ..messages.deadletters import DeadLetter
from ..telemetry.traces import carries_trace, handling
from .connection import Connection
from .envelope import Malformed, Received, decode, encode, headers_for
from .subjects import DEAD_LETTER

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
NUM_REMEMBERED = 10_000
MAX_BODY_CHARACTERS = 4096
_DONE = Accepted()


class Delivery(Generic[M]):
    """Delivers the messages of one subscription, and remembers the newest ids with their results."""

    def __init__(self, model: type[M] | Callable[[str], type[M]], connection: Connection, service: str) -> None:
        self._model = model
        self._connection = connection
        self._service = service
        self._done: OrderedDict[str, tuple[bytes, Accepted | Refused]] = OrderedDict()
        """The digest and the result of each message, by message id."""

    async def deliver(self, message: Msg, handler: Callable[[Received[M]], Awaitable[None]]) -> None:
        """Have the message handled, unless it was already; a dead letter says why that was not possible."""
        try:
            received = self._decode(message)
        except Malformed as error:
            await self._send_dead_letter(message, str(error))
            return
        if received.id in self._done:
            return
        try:
            is_traced = received.sequence is not None or carries_trace(message.headers)
            with handling("handle", message.subject, message.headers) if is_traced else nullcontext():
                await handler(received)
        except Exception as error:
            logger.exception("handler failed subject=%s", message.subject)
            reason = f"{self._service} failed to handle it: {type(error).__name__}: {error}"
            await self._send_dead_letter(message, reason)
        else:
            self._remember(b"", received.id, _DONE)

    async def answer(
        self, message: Msg, handler: Callable[[Received[M]], Awaitable[Accepted | Refused]]
    ) -> Accepted | Refused:
        """Return the answer to a request: that of the handler, now or earlier, or why it could not be called.

        A request with the id of another one is refused.
        """
        try:
            received = self._decode(message)
        except Malformed as error:
            await self._send_dead_letter(message, str(error))
            return Refused(code="malformed", reason=str(error))
        if received.id in self._done:
            digest, earlier = self._done[received.id]
            return earlier if digest == _digest(message) else ID_REUSED
        try:
            with handling("answer", message.subject, message.headers):
                answer = await handler(received)
        except Exception as error:
            logger.exception("handler failed subject=%s", message.subject)
            reason = f"{self._service} failed to handle it: {type(error).__name__}: {error}"
            await self._send_dead_letter(message, reason)
            return Refused(code="unavailable", reason=reason)
        if answer != ID_REUSED:  # the id belongs to the other request
            self._remember(_digest(message), received.id, answer)
        return answer

    def _decode(self, message: Msg) -> Received[M]:
        model = self._model if isinstance(self._model, type) else self._model(message.subject)
        sequence = message.metadata.sequence.stream if _is_stored(message) else None
        return decode(model, subject=message.subject, headers=message.headers, body=message.data, sequence=sequence)

    def _remember(self, digest: bytes, message_id: str, answer: Accepted | Refused) -> None:
        self._done[message_id] = digest, answer
        if len(self._done) > NUM_REMEMBERED:
            self._done.popitem(last=False)

    async def _send_dead_letter(self, message: Msg, reason: str) -> None:
        """Publish a message that had no effect, with the reason; an unreadable dead letter is only logged.

        The dead letter of a stored message is stored before the next one is handled.
        """
        logger.warning("message dropped subject=%s: %s", message.subject, reason)
        if message.subject == DEAD_LETTER:
            return
        letter = DeadLetter(
            subject=message.subject,
            service=self._service,
            reason=reason,
            time=datetime.now(UTC),
            headers={name: str(value)[:200] for name, value in list((message.headers or {}).items())[:20]},
            body=message.data.decode(errors="backslashreplace")[:MAX_BODY_CHARACTERS],
        )
        if not _is_stored(message):
            await self._connection.send(DEAD_LETTER, encode(letter), headers=headers_for(letter, source=self._service))
            return
        place = message.metadata
        message_id = f"{self._service}/{place.stream}/{place.sequence.stream}"
        headers = headers_for(letter, source=self._service, message_id=message_id) | {"Nats-Msg-Id": message_id}
        await self._connection.request_store(DEAD_LETTER, encode(letter), headers=headers)


def _digest(message: Msg) -> bytes:
    return sha256(message.subject.encode() + b"\n" + message.data).digest()


def _is_stored(message: Msg) -> bool:
    """Whether a message comes from a stream."""
    return message.reply.startswith("$JS.ACK.")
