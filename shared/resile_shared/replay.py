"""What a stream holds, for whoever only looks at it: its last messages, and all that follow a place.

A message that cannot be read is left out: to tell of it is up to whoever acts on the stream.
"""

import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from nats.aio.msg import Msg
from pydantic import BaseModel

from .connection import Connection
from .envelope import Malformed, Received, decode
from .pull import BATCH, Begin, Reader

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
_WIDER = 8
_FEW = 16


@dataclass(frozen=True)
class Tail(Generic[M]):
    """The newest messages. Whatever is not among them and newer has a sequence above ``last``."""

    messages: tuple[Received[M], ...]
    last: int


class Replay(Generic[M]):
    """Reads the messages of one stream that are on one of ``subjects``. Every call waits for a bus that is away."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        model: type[M] | Callable[[str], type[M]],
        subjects: tuple[str, ...],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._model = model
        self._subjects = subjects

    async def last(self) -> int:
        """Return the sequence of the newest message of the stream, whatever its subject; 0 for none."""
        return (await self._ends())[1]

    async def tail(self, num: int) -> Tail[M]:
        """Return the newest ``num`` messages, or as many as there are."""
        first, last = await self._ends()
        newest: deque[Msg] | None = deque() if num == 0 else None
        width = num
        while newest is None:
            after = max(last - width, first - 1)
            newest = await self._present(after, num=num, at_least=num if after >= first else 0)
            width *= _WIDER
        messages = (self._read(message) for message in newest)
        last = max((last, *(message.metadata.sequence.stream for message in newest)))
        return Tail(tuple(message for message in messages if message is not None), last)

    async def follow(self, *, after: int) -> AsyncGenerator[Received[M], None]:
        """Yield each message with a sequence above ``after``, for ever. Who takes them slowly makes few wait here."""
        async with aclosing(self._reader(after, batch=_FEW).read()) as items:
            async for item in items:
                if not isinstance(item, Begin) and (message := self._read(item)) is not None:
                    yield message

    async def _ends(self) -> tuple[int, int]:
        """Return the sequences of the oldest and the newest message; without any, those of the next and the last."""
        answer = await self._connection.request_store(f"$JS.API.STREAM.INFO.{self._stream}", b"")
        return max(1, answer["state"]["first_seq"]), answer["state"]["last_seq"]

    async def _present(self, after: int, *, num: int, at_least: int) -> deque[Msg] | None:
        """Return the newest ``num`` of the messages above ``after``, None if there are fewer than ``at_least``."""
        reader = self._reader(after)
        newest: deque[Msg] = deque(maxlen=num)
        async with aclosing(reader.read()) as items:
            async for item in items:
                if not isinstance(item, Begin):
                    newest.append(item)
                elif item.num_pending < at_least:
                    return None
                if reader.num_waiting <= 0:
                    break
        return newest

    def _reader(self, after: int, *, batch: int = BATCH) -> Reader:
        return Reader(self._connection, self._stream, self._subjects, after=after, batch=batch)

    def _read(self, message: Msg) -> Received[M] | None:
        try:
            return decode(
                self._model if isinstance(self._model, type) else self._model(message.subject),
                subject=message.subject,
                headers=message.headers,
                body=message.data,
                sequence=message.metadata.sequence.stream,
                stored=message.metadata.timestamp,
            )
        except Malformed as error:
            logger.debug("a message on %s is left out: %s", message.subject, error)
            return None
