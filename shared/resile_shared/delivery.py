"""One message on its way to its handler: read, recognised when it comes twice, traced, and never fatal."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Generic, TypeVar

from nats.aio.msg import Msg
from pydantic import BaseModel

from .connection import Connection
from .envelope import Malformed, Received, decode, encode, headers_for
from .messages.commands import Accepted, Refused
from .messages.deadletters import DeadLetter
from .subjects import DEAD_LETTER
from .telemetry import continued

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
NUM_REMEMBERED = 10_000
MAX_BODY_CHARACTERS = 4096
_DONE = Accepted()


class Delivery(Generic[M]):
    """Delivers the messages of one subscription, and remembers the newest ids with what became of them."""

    def __init__(self, model: type[M] | Callable[[str], type[M]], connection: Connection, service: str) -> None:
        self._model = model
        self._connection = connection
        self._service = service
        self._done: OrderedDict[str, Accepted | Refused] = OrderedDict()

    async def deliver(
        self, message: Msg, handler: Callable[[Received[M]], Awaitable[None]], *, is_last: bool = True
    ) -> bool:
        """Return whether the message is dealt with; False: the handler failed, and it is not the last attempt."""
        try:
            received = self._decode(message)
        except Malformed as error:
            await self._bury(message, str(error))
            return True
        if received.id in self._done:
            return True
        try:
            with continued(f"handle {message.subject}", message.headers, always=received.sequence is not None):
                await handler(received)
        except Exception as error:
            logger.exception("handling %s failed", message.subject)
            if is_last:
                await self._bury(message, f"{self._service} could not handle it: {type(error).__name__}: {error}")
            return is_last
        self._remember(received.id, _DONE)
        return True

    async def answer(
        self, message: Msg, handler: Callable[[Received[M]], Awaitable[Accepted | Refused]]
    ) -> Accepted | Refused:
        """Return the answer to a request: of the handler, of its earlier call, or why it could not be called."""
        try:
            received = self._decode(message)
        except Malformed as error:
            await self._bury(message, str(error))
            return Refused(code="malformed", reason=str(error))
        if received.id in self._done:
            return self._done[received.id]
        try:
            with continued(f"answer {message.subject}", message.headers):
                answer = await handler(received)
        except Exception as error:
            logger.exception("answering %s failed", message.subject)
            reason = f"{self._service} could not handle it: {type(error).__name__}: {error}"
            await self._bury(message, reason)
            return Refused(code="unavailable", reason=reason)
        self._remember(received.id, answer)
        return answer

    def _decode(self, message: Msg) -> Received[M]:
        model = self._model if isinstance(self._model, type) else self._model(message.subject)
        sequence = message.metadata.sequence.stream if _is_stored(message) else None
        return decode(model, subject=message.subject, headers=message.headers, body=message.data, sequence=sequence)

    def _remember(self, message_id: str, answer: Accepted | Refused) -> None:
        self._done[message_id] = answer
        if len(self._done) > NUM_REMEMBERED:
            self._done.popitem(last=False)

    async def _bury(self, message: Msg, reason: str) -> None:
        """Publish what had no effect, and why; a dead letter that cannot be read is only logged.

        The letter of a stored message is stored before the message counts as dealt with.
        """
        logger.warning("a message on %s had no effect: %s", message.subject, reason)
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


def _is_stored(message: Msg) -> bool:
    """Whether a message comes from a stream."""
    return message.reply.startswith("$JS.ACK.")
