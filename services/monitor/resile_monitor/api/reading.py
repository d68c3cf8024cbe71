"""Streams as clients read them: the newest entries, and those after any place.

A place is the sequence of the last message that was sent completely, or ``<sequence>.<number>`` when only the first
``number`` entries of that message were sent: one message of a log holds many lines.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from pydantic import BaseModel

from resile_shared.bus.envelope import Received
from resile_shared.bus.stream_reader import StreamReader
from resile_shared.http.api import View

M = TypeVar("M", bound=BaseModel)
V = TypeVar("V", bound=View)
MAX_TAIL_BYTES = 8 << 20
_FEW = 32
_WIDER = 8


@dataclass(frozen=True)
class Entry(Generic[V]):
    """One entry of a stream: the ``number``-th, from 1, of the message ``sequence``."""

    stream: str
    sequence: int
    number: int
    is_last: bool
    stored: datetime
    view: V

    @property
    def place(self) -> str:
        """The place of a reader that has received this entry."""
        return f"{self.sequence}" if self.is_last else f"{self.sequence}.{self.number}"

    @property
    def place_before(self) -> str:
        """The place of a reader that lacks this entry but no earlier one."""
        return f"{self.sequence}.{self.number - 1}" if self.number > 1 else f"{self.sequence - 1}"


@dataclass(frozen=True)
class Newest(Generic[V]):
    """The newest entries of a stream, and the place after all that is stored."""

    entries: list[Entry[V]]
    place: str
    is_cut: bool
    """Whether entries that were asked for are left out because the older messages have too many bytes."""


class Reading(Generic[M, V]):
    """One stream, and how its messages are shown. Every call waits while NATS is disconnected."""

    def __init__(self, name: str, replay: StreamReader[M], show: Callable[[Received[M]], Sequence[V]]) -> None:
        self.name = name
        self._replay = replay
        self._show = show

    async def tail(self, num: int) -> "Newest[V]":
        """Return the newest ``num`` entries, but of no more than `MAX_TAIL_BYTES` of messages."""
        width = min(num, _FEW)
        while True:
            tail = await self._replay.tail(width, max_bytes=MAX_TAIL_BYTES)
            entries = [entry for message in tail.messages for entry in self._entries(message)]
            if len(entries) >= num or width == num or tail.is_cut:
                is_cut = tail.is_cut and len(entries) < num
                return Newest(entries[max(0, len(entries) - num) :], f"{tail.last}", is_cut)
            width = min(num, _WIDER * width)

    async def has_after(self, place: str) -> bool:
        """Return whether there is an entry after ``place`` now."""
        after, num_sent = _position(place)
        while (message := await self._replay.first_after(after)) and message.sequence is not None:
            if any(entry.sequence > after + 1 or entry.number > num_sent for entry in self._entries(message)):
                return True
            after, num_sent = message.sequence, 0
        return False

    async def follow(self, place: str) -> AsyncGenerator[Entry[V], None]:
        """Yield each entry after ``place``, forever."""
        after, num_sent = _position(place)
        async with aclosing(self._replay.follow(after=after)) as messages:
            async for message in messages:
                for entry in self._entries(message):
                    if entry.sequence != after + 1 or entry.number > num_sent:
                        yield entry

    def _entries(self, message: Received[M]) -> list[Entry[V]]:
        assert message.sequence is not None
        assert message.stored is not None
        views = self._show(message)
        return [
            Entry(self.name, message.sequence, number, number == len(views), message.stored, view)
            for number, view in enumerate(views, start=1)
        ]


def _position(place: str) -> tuple[int, int]:
    """Return the last sequence that was sent completely, and how many entries of the next message were sent."""
    sequence, _, num_sent = place.partition(".")
    return (int(sequence) - 1, int(num_sent)) if num_sent and int(sequence) else (int(sequence), 0)


def merged(tails: Iterable[Newest[V]], *, num: int) -> list[Entry[V]]:
    """Return the newest ``num`` entries of several streams, in the order in which they were stored.

    No entry is older than the first one of a stream that is cut, so none is missing between others.
    """
    streams = list(tails)
    begins = [tail.entries[0].stored for tail in streams if tail.is_cut and tail.entries]
    entries = (entry for tail in streams for entry in tail.entries)
    in_order = sorted(
        (entry for entry in entries if not begins or entry.stored >= max(begins)), key=lambda entry: entry.stored
    )
    return in_order[max(0, len(in_order) - num) :]
