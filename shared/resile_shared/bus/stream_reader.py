"""Reads a stream without a consumer: its newest messages, or every message after a sequence.

Reads page by page and keeps no state on the server: a stream has a limited number of consumers, and those are for
services that act on its messages. A message that cannot be decoded is skipped; the consumers report it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Generic, TypeVar

import orjson
from nats.aio.msg import Msg
from pydantic import BaseModel

from .connection import RESEND_SECONDS, Connection, StoreFailed
from .envelope import Malformed, Received, decode

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
PAGE_MESSAGES = 256
PAGE_BYTES = 1 << 20
SHORTEST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class Tail(Generic[M]):
    """The newest messages of a stream. Later ones have a sequence above ``last``."""

    messages: tuple[Received[M], ...]
    last: int
    is_cut: bool
    """Whether older messages that were asked for are left out because they have too many bytes."""


@dataclass(frozen=True)
class _Page:
    """Some messages, and the number of matching messages stored after them."""

    messages: tuple[Msg, ...]
    num_after: int


class StreamReader(Generic[M]):
    """Reads the messages of one stream, or of one ``subject`` in it. Every call waits while NATS is disconnected."""

    def __init__(
        self, connection: Connection, stream: str, model: type[M] | Callable[[str], type[M]], subject: str | None
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._model = model
        self._subject = subject

    async def last(self) -> int:
        """Return the sequence of the newest message of the stream, whatever its subject; 0 for none."""
        return (await self._ends())[1]

    async def newest(self) -> Received[M] | None:
        """Return the newest message, None without one. Raises Malformed."""
        message = await newest_message(self._connection, self._stream, self._subject or ">")
        return self._decode(message) if message else None

    async def tail(self, num: int, *, max_bytes: float = inf) -> Tail[M]:
        """Return the newest ``num`` messages, or as many as there are: up to ``max_bytes``, but at least one."""
        first, last = await self._ends()
        found: deque[Msg] = deque()
        num_bytes, is_cut = 0, False
        after = await self._sequence_before_newest(num, first, last) if num else last
        while after < last:
            page = await self._page(after)
            found += page.messages
            num_bytes += sum(len(message.data) for message in page.messages)
            while len(found) > num or (num_bytes > max_bytes and len(found) > 1):
                is_cut = is_cut or len(found) <= num
                num_bytes -= len(found.popleft().data)
            after = sequence_of(page.messages[-1]) if page.messages else last
            if not page.num_after:
                break
        messages = tuple(received for message in found if (received := self._read(message)))
        return Tail(messages, max(after, last), is_cut)

    async def page(self, num: int, *, skip: int) -> tuple[Received[M], ...]:
        """Return the newest ``num`` messages of those before the newest ``skip``, in order."""
        first, last = await self._ends()
        after = await self._sequence_before_newest(num + skip, first, last)
        num_there = min(num, max(0, await self._count(after) - skip))
        found: list[Msg] = []
        while len(found) < num_there:
            page = await self._page(after, num=min(PAGE_MESSAGES, num_there - len(found)))
            if not page.messages:
                break
            found += page.messages
            after = sequence_of(page.messages[-1])
        return tuple(received for message in found if (received := self._read(message)))

    async def first_after(self, after: int) -> Received[M] | None:
        """Return the first message with a sequence above ``after``, None without one."""
        while (page := await self._page(after, num=1)).messages:
            if received := self._read(page.messages[0]):
                return received
            after = sequence_of(page.messages[0])
        return None

    async def follow(self, *, after: int, caught_up: asyncio.Event | None = None) -> AsyncGenerator[Received[M], None]:
        """Yield each message with a sequence above ``after``; never ends.

        Where the stream ends before that, because an older store of the bus was restored, go on with what was stored
        since the last message read. ``caught_up`` is set when every message stored so far has been handled.
        """
        pause, time = SHORTEST_PAUSE_SECONDS, ""
        may_be_restored = asyncio.Event()
        may_be_restored.set()
        self._connection.on_return.add(may_be_restored.set)
        try:
            while True:
                if may_be_restored.is_set():
                    may_be_restored.clear()
                    after = await self._within(after, time)
                page = await self._page(after)
                for message in page.messages:
                    after, time = sequence_of(message), (message.headers or {})["Nats-Time-Stamp"]
                    if received := self._read(message):
                        yield received
                if not page.num_after:
                    if caught_up:
                        caught_up.set()
                    pause = SHORTEST_PAUSE_SECONDS if page.messages else min(2 * pause, LONGEST_PAUSE_SECONDS)
                    await asyncio.sleep(pause)
        finally:
            self._connection.on_return.discard(may_be_restored.set)

    async def _within(self, after: int, time: str) -> int:
        """Return ``after``, or if the stream ends before it, the sequence before the first message since ``time``."""
        last = await self.last()
        if after <= last or not time:
            return min(after, last)
        page = await self._request_page({"start_time": time, "batch": 1})
        return sequence_of(page.messages[0]) - 1 if page.messages else last

    async def _ends(self) -> tuple[int, int]:
        """Return the sequences of the oldest and the newest message; without any, those of the next and the last."""
        answer = await self._connection.request_store(f"$JS.API.STREAM.INFO.{self._stream}", b"")
        return max(1, answer["state"]["first_seq"]), answer["state"]["last_seq"]

    async def _sequence_before_newest(self, num: int, first: int, last: int) -> int:
        """Return a sequence after which there are ``num`` messages, or all if there are fewer. Binary search."""
        low, high = first - 1, max(first - 1, last - num)
        middle = high
        while low < high:
            if await self._count(middle) >= num:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    async def _count(self, after: int) -> int:
        page = await self._page(after, num=1)
        return len(page.messages) + page.num_after

    async def _page(self, after: int, *, num: int = PAGE_MESSAGES) -> _Page:
        """Return the next messages after the sequence ``after``."""
        return await self._request_page({"seq": after + 1, "batch": num, "max_bytes": PAGE_BYTES})

    async def _request_page(self, request: dict[str, int | str]) -> _Page:
        if self._subject:
            request["next_by_subj"] = self._subject
        while True:
            replies = await self._connection.request_many(
                f"$JS.API.DIRECT.GET.{self._stream}", orjson.dumps(request), is_last=_is_end
            )
            *messages, end = replies
            headers = end.headers or {}
            match headers.get("Status"):
                case "204":
                    return _Page(tuple(messages), int(headers["Nats-Num-Pending"]))
                case "404":
                    return _Page((), 0)
                case "503" | "429":
                    await asyncio.sleep(RESEND_SECONDS)
                case _:
                    raise StoreFailed(f"$JS.API.DIRECT.GET.{self._stream}", {"description": headers.get("Description")})

    def _read(self, message: Msg) -> Received[M] | None:
        try:
            return self._decode(message)
        except Malformed as error:
            logger.debug("skipping unreadable message sequence=%s: %s", sequence_of(message), error)
            return None

    def _decode(self, message: Msg) -> Received[M]:
        headers = message.headers or {}
        subject = headers["Nats-Subject"]
        return decode(
            self._model if isinstance(self._model, type) else self._model(subject),
            subject=subject,
            headers=headers,
            body=message.data,
            sequence=sequence_of(message),
            stored=datetime.fromisoformat(headers["Nats-Time-Stamp"]),
        )


async def newest_message(connection: Connection, stream: str, subject: str) -> Msg | None:
    """Return the newest message of ``stream`` that matches ``subject``, None without one."""
    address = f"$JS.API.DIRECT.GET.{stream}"
    message = await connection.request(address, orjson.dumps({"last_by_subj": subject}))
    headers = message.headers or {}
    if headers.get("Status") == "404":
        return None
    if "Nats-Sequence" not in headers:
        raise StoreFailed(address, {"description": headers.get("Description", "no sequence")})
    return message


def _is_end(message: Msg) -> bool:
    return "Nats-Sequence" not in (message.headers or {})


def sequence_of(message: Msg) -> int:
    """Return the sequence of a message that was read directly from a stream."""
    assert message.headers is not None
    return int(message.headers["Nats-Sequence"])
