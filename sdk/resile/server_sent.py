"""Reading server-sent events, as the HTML standard (section 9.2) has them."""

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSent:
    """One event: its id, empty where it has none, and its data."""

    id: str
    data: str


async def read_events(lines: AsyncIterable[bytes]) -> AsyncIterator[ServerSent]:
    """Turn the lines of an answer into events. One that is cut off is dropped."""
    name = ""
    data: list[str] = []
    async for line in lines:
        field, _, value = line.decode().rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            name = value
        elif field == "data":
            data.append(value)
        elif not field and not value and data:
            yield ServerSent(name, "\n".join(data))
            data = []
