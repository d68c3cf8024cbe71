"""What a job's workers printed."""

from collections.abc import Sequence
from datetime import datetime

from aiohttp import web
from pydantic import Field

from resile_shared.api import LogEntry, LogList
from resile_shared.envelope import Received
from resile_shared.messages.logs import LogLine, LogLines
from resile_shared.messages.message import Message
from resile_shared.subjects import LOGS, log

from .following import follow, newest
from .pool import Pool
from .reading import Reading
from .requests import answer, read_query


class LogQuery(Message):
    """The parameters of ``GET /v1/jobs/{job}/logs``."""

    tail: int = Field(default=100, ge=0, le=10_000)
    follow: bool = False


class Logs:
    """The handler of ``GET /v1/jobs/{job}/logs``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/v1/jobs/{job}/logs", self._logs, allow_head=False)]

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        query = read_query(request, LogQuery)
        job = (await self._pool.record(request.match_info["job"])).job

        def is_over() -> bool:
            record = self._pool.projection.record(job)
            return record is not None and record.state.is_final

        readings = [Reading("logs", self._pool.bus.read_stream(LOGS, LogLines, subject=log(job)), _entries)]
        if query.follow:
            return await follow(request, readings, num=query.tail, closing=self._pool.closing, is_over=is_over)
        entries, _ = await newest(readings, query.tail)
        return answer(LogList(lines=tuple(entry.view for entry in entries)))


def _entries(received: Received[LogLines]) -> Sequence[LogEntry]:
    said = received.message
    entries = [_entry(received, line) for line in said.lines]
    if not said.dropped:
        return entries
    note = LogEntry(
        sequence=received.sequence or 0,
        time=entries[0].time if entries else _stored(received),
        host=said.host,
        worker=said.worker,
        stream="note",
        text=f"{said.dropped} lines were dropped here, for want of room",
    )
    return [note, *entries]


def _stored(received: Received[LogLines]) -> datetime:
    assert received.stored is not None
    return received.stored


def _entry(received: Received[LogLines], line: LogLine) -> LogEntry:
    said = received.message
    return LogEntry(
        sequence=received.sequence or 0,
        time=line.time,
        host=said.host,
        worker=said.worker,
        stream=line.stream,
        text=line.text,
    )
