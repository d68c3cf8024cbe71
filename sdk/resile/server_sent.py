"""Reading server-sent events, as the HTML standard (section 9.2) has them."""

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSent:
    """One event: its data, and the id of this one or the last that had one. No data: only the id is new."""

    id: str
    data: str


async def read_events(pieces: AsyncIterable[bytes]) -> AsyncIterator[ServerSent]:
    """Turn an answer, in pieces of any size, into events. One that is cut off is dropped."""
    name, is_news = "", False
    data: list[str] = []
    async for line in _lines(pieces):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            name, is_news = value, True
        elif field == "data":
            data.append(value)
        elif not field and not value and (data or is_news):
            yield ServerSent(name, "\n".join(data))
            data, is_news = [], False


async def _lines(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield lines of any length without their ends; aiohttp itself fails on long ones."""
    rest: list[bytes] = []
    async for piece in pieces:
        first, *others = piece.split(b"\n")
        rest.append(first)
        for other in others:
            yield b"".join(rest).rstrip(b"\r").decode(errors="replace")
            rest = [other]
