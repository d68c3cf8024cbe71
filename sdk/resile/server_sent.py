"""Reading server-sent events, as the HTML standard (section 9.2) has them."""

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSent:
    """One event: its data, and the id of this one or the last that had one. No data: only the id is news."""

    id: str
    data: str


async def read_events(lines: AsyncIterable[bytes]) -> AsyncIterator[ServerSent]:
    """Turn the lines of an answer into events. One that is cut off is dropped."""
    name, is_news = "", False
    data: list[str] = []
    async for line in lines:
        field, _, value = line.decode().rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            name, is_news = value, True
        elif field == "data":
            data.append(value)
        elif not field and not value and (data or is_news):
            yield ServerSent(name, "\n".join(data))
            data, is_news = [], False
