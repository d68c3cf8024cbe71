"""Events of the pool, and of one job together with what its workers reported and printed."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from aiohttp import web
from pydantic import BaseModel, Field, model_validator

from resile_shared.bus.catalogue import model_of
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import EVENTS, LOGS, PROGRESS, REPORTS, job_events, log, report, reports_of
from resile_shared.http.api import EventList, EventView
from resile_shared.messages.logs import LogLines
from resile_shared.messages.message import Id, Message
from resile_shared.messages.reports import Report

from .following import follow, newest
from .logs import log_entries
from .operations import Operation
from .pool import Pool
from .reading import Reading
from .requests import answer, read_query


class EventQuery(Message):
    """The parameters of ``GET /v1/events``."""

    job: Id | None = None
    tail: int = Field(default=100, ge=0, le=10_000)
    follow: bool = False
    logs: bool = Field(default=False, description="with `job`: also the lines that its workers print")

    @model_validator(mode="after")
    def _logs_are_of_a_job(self) -> Self:
        if self.logs and self.job is None:
            raise ValueError("logs=1 needs a job: add job=ID")
        return self


class Events:
    """The handler of ``GET /v1/events``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/events", "Events of the pool", EventList, query=EventQuery, streams=EventView)
    async def _events(self, request: web.Request) -> web.StreamResponse:
        query = read_query(request, EventQuery)
        readings = self._readings()
        if query.job:
            readings = self._readings_of((await self._pool.record(query.job)).job, logs=query.logs)
        if query.follow:
            return await follow(request, readings, num=query.tail, pool=self._pool, job=query.job)
        entries, _ = await newest(readings, query.tail)
        return answer(EventList(events=tuple(entry.view for entry in entries)))

    def _readings(self) -> list[Reading[Any, EventView]]:
        return [Reading("events", self._pool.bus.read_stream(EVENTS, model_of), _event)]

    def _readings_of(self, job: str, *, logs: bool) -> list[Reading[Any, EventView]]:
        bus = self._pool.bus
        of_job = bus.read_stream(EVENTS, model_of, subject=job_events(job))
        told = bus.read_stream(REPORTS, Report, subject=reports_of(job))
        progress = bus.read_stream(PROGRESS, Report, subject=report(job, "progress"))
        readings: list[Reading[Any, EventView]] = [
            Reading("events", of_job, _event),
            Reading("reports", told, _report),
            Reading("progress", progress, _progress),
        ]
        if logs:
            readings.append(Reading("logs", bus.read_stream(LOGS, LogLines, subject=log(job)), _lines))
        return readings


def _event(received: Received[BaseModel]) -> tuple[EventView]:
    return (_view("events", received),)


def _report(received: Received[Report]) -> tuple[EventView]:
    return (_view("reports", received),)


def _progress(received: Received[Report]) -> tuple[EventView]:
    return (_view("progress", received),)


def _lines(received: Received[LogLines]) -> Sequence[EventView]:
    return [_view("logs", received, entry) for entry in log_entries(received)]


def _view(
    stream: Literal["events", "reports", "progress", "logs"], received: Received[Any], shown: BaseModel | None = None
) -> EventView:
    assert received.sequence is not None
    assert received.stored is not None
    return EventView(
        stream=stream,
        sequence=received.sequence,
        time=received.stored,
        subject=received.subject,
        data=(shown or received.message).model_dump(mode="json"),
    )
