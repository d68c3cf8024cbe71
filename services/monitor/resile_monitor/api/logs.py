"""What a job's workers printed."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from aiohttp import web
from pydantic import Field

from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import LOGS, log
from resile_shared.http.api import LogEntry, LogList
from resile_shared.messages.logs import LogLines
from resile_shared.messages.message import Message

from .following import follow, newest
from .operations import Operation
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

    @Operation("get", "/v1/jobs/{job}/logs", "What the workers printed", LogList, query=LogQuery, streams=LogEntry)
    async def _logs(self, request: web.Request) -> web.StreamResponse:
        query = read_query(request, LogQuery)
        job = (await self._pool.record(request.match_info["job"])).job
        readings = [Reading("logs", self._pool.bus.read_stream(LOGS, LogLines, subject=log(job)), log_entries)]
        if query.follow:
            return await follow(request, readings, num=query.tail, pool=self._pool, job=job)
        entries, _ = await newest(readings, query.tail)
        return answer(LogList(lines=tuple(entry.view for entry in entries)))


def log_entries(received: Received[LogLines]) -> Sequence[LogEntry]:
    """Return the lines of one message, with a note if some were dropped before them."""
    batch = received.message
    assert received.stored is not None

    def entry(time: datetime, stream: Literal["stdout", "stderr", "note"], text: str) -> LogEntry:
        sequence = received.sequence or 0
        return LogEntry(sequence=sequence, time=time, host=batch.host, worker=batch.worker, stream=stream, text=text)

    entries = [entry(line.time, line.stream, line.text) for line in batch.lines]
    if not batch.dropped:
        return entries
    time = entries[0].time if entries else received.stored
    return [entry(time, "note", f"{batch.dropped} lines were dropped here: the buffer was full"), *entries]
