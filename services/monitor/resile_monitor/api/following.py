"""Server-sent events: what is stored, then what follows, until either side disconnects.

The ``id`` of an event says how far its reader has come in each stream that it reads (``events:17,reports:40``), so that
the reader can resume from there. A short queue connects the streams to a client: a slow client delays only its own
events, and nothing accumulates.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from resile_shared.errors import ResileError
from resile_shared.http.server import WRITE_SECONDS

from ..metrics import MonitorMetrics
from .pool import Pool, bus_timeout
from .problems import ProblemError
from .reading import Entry, Reading, V, merged

logger = logging.getLogger(__name__)

QUEUE_LENGTH = 256
"""The most entries queued for a client; they are written together when it is slower than they arrive."""
KEEP_ALIVE_SECONDS = 10.0
LOOK_SECONDS = 0.5
LAST_SECONDS = 1.0
"""Seconds in which the last entries of a job that is over arrive."""
NO_ANSWER = "the bus does not respond: try again"
_PLACE = re.compile(r"([a-z]+):([0-9]{1,18}(?:\.[0-9]{1,9})?)")


async def newest(readings: Sequence[Reading[Any, V]], num: int) -> tuple[list[Entry[V]], dict[str, str]]:
    """Return the newest ``num`` entries of several streams, or fewer if they are large, and the end of each."""
    async with bus_timeout(NO_ANSWER):
        tails = {reading.name: await reading.tail(num) for reading in readings}
    return merged(tails.values(), num=num), {name: tail.place for name, tail in tails.items()}


async def follow(
    request: web.Request, readings: Sequence[Reading[Any, V]], *, num: int, pool: Pool, job: str | None = None
) -> web.StreamResponse:
    """Send the entries after ``Last-Event-ID``, or without one the newest ``num`` entries and those after them.

    Ends when the client disconnects, the monitor stops, or ``job`` is over and all of it was sent. A client that then
    reconnects gets 204, so that it does not try again. Raises ProblemError.
    """
    places = _places(request, readings)
    if places and job:
        async with bus_timeout(NO_ANSWER):
            if await pool.is_over(job) and not await _has_more(readings, places):
                return web.Response(status=204)
    present: list[Entry[V]] = []
    if places is None:
        present, places = await newest(readings, num)
    sources = [reading.follow(places[reading.name]) for reading in readings]
    reached = places | {entry.stream: entry.place_before for entry in reversed(present)}
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    ends = [pool.closing.wait(), *([_wait_for_end(pool, job, readings, reached)] if job else [])]
    pool.metrics.streams.add(1)
    try:
        await _send(response, _Frames(reached, pool.metrics), present, sources, ends)
    finally:
        pool.metrics.streams.add(-1)
    return response


class _Frames:
    """Events as they are sent, each with how far its reader has come with it."""

    def __init__(self, reached: dict[str, str], metrics: MonitorMetrics) -> None:
        self._reached = reached
        self._metrics = metrics

    def start(self) -> bytes:
        """Return an id without an event: a reader that loses the connection before the first event can resume, too."""
        return f"id: {self._id}\n\n".encode()

    def _of(self, entry: Entry[V]) -> bytes:
        self._reached[entry.stream] = entry.place
        return f"id: {self._id}\ndata: {entry.view.model_dump_json()}\n\n".encode()

    def of_all(self, entries: Sequence[Entry[V]]) -> bytes:
        for stream, num in Counter(entry.stream for entry in entries).items():
            self._metrics.events.add(num, {"stream": stream})
        return b"".join(map(self._of, entries))

    @property
    def _id(self) -> str:
        return ",".join(f"{stream}:{place}" for stream, place in self._reached.items())


async def _send(
    response: web.StreamResponse,
    frames: _Frames,
    present: list[Entry[V]],
    sources: Sequence[AsyncGenerator[Entry[V], None]],
    ends: Sequence[Coroutine[Any, Any, object]],
) -> None:
    queue: asyncio.Queue[Entry[V] | None] = asyncio.Queue(QUEUE_LENGTH)
    tasks = [asyncio.create_task(_then_end(work, queue)) for work in (*ends, *(_pump(each, queue) for each in sources))]
    try:
        await _write(response, frames.start())
        for start in range(0, len(present), QUEUE_LENGTH):
            await _write(response, frames.of_all(present[start : start + QUEUE_LENGTH]))
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    batch = await _next_batch(queue)
            except TimeoutError:
                await _write(response, b": still here\n\n")
                continue
            await _write(response, frames.of_all([entry for entry in batch if entry is not None]))
            if None in batch:
                break
        await response.write_eof()
    except (TimeoutError, ConnectionError):
        logger.debug("event stream client disconnected")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _next_batch(queue: asyncio.Queue[Entry[V] | None]) -> list[Entry[V] | None]:
    """Wait for an entry, or for the end; return it with all that are queued behind it, up to the end."""
    batch = [await queue.get()]
    while batch[-1] is not None and not queue.empty():
        batch.append(queue.get_nowait())
    return batch


async def _write(response: web.StreamResponse, frame: bytes) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await response.write(frame)


async def _pump(source: AsyncGenerator[Entry[V], None], queue: asyncio.Queue[Entry[V] | None]) -> None:
    """Put each entry of ``source`` into ``queue``."""
    async with aclosing(source):
        async for entry in source:
            await queue.put(entry)


async def _then_end(work: Coroutine[Any, Any, object], queue: asyncio.Queue[Entry[V] | None]) -> None:
    """End the stream once ``work`` has ended, or failed: the client reconnects."""
    try:
        await work
    except ResileError as error:
        logger.warning("event stream failed: %s", error)
    except Exception:
        logger.exception("event stream failed")
    await queue.put(None)


async def _wait_for_end(
    pool: Pool, job: str, readings: Sequence[Reading[Any, Any]], reached: Mapping[str, str]
) -> None:
    """Return when ``job`` is over, its last entries had time to arrive, and all that is stored was sent."""
    while not await pool.is_over(job):  # noqa: ASYNC110 - the scheduler sets no event
        await asyncio.sleep(LOOK_SECONDS)
    await asyncio.sleep(LAST_SECONDS)
    while await _has_more(readings, reached):  # noqa: ASYNC110 - nor does the bus
        await asyncio.sleep(LOOK_SECONDS)


async def _has_more(readings: Sequence[Reading[Any, Any]], places: Mapping[str, str]) -> bool:
    return any([await reading.has_after(places[reading.name]) for reading in readings])


def _places(request: web.Request, readings: Sequence[Reading[Any, V]]) -> dict[str, str] | None:
    """Return how far a client that reconnects has come in each stream; None for a new client."""
    text = request.headers.get("Last-Event-ID")
    if not text:
        return None
    found = [_PLACE.fullmatch(part) for part in text.split(",")]
    places = {match[1]: match[2] for match in found if match}
    if None in found or places.keys() != {reading.name for reading in readings}:
        raise ProblemError("malformed", f"Last-Event-ID {text[:100]!r} is not an id of this stream: omit the header")
    return places
