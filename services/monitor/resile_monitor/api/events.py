"""Events of the pool, and of one job together with what its workers told."""

from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, Field

from resile_shared.api import EventList, EventView
from resile_shared.catalogue import model_of
from resile_shared.envelope import Received
from resile_shared.messages.message import Id, Message
from resile_shared.messages.reports import Report
from resile_shared.subjects import EVENTS, PROGRESS, REPORTS, job_events, report, reports_of

from .following import follow, newest
from .pool import Pool
from .reading import Reading
from .requests import answer, read_query


class EventQuery(Message):
    """The parameters of ``GET /v1/events``."""

    job: Id | None = None
    tail: int = Field(default=100, ge=0, le=10_000)
    follow: bool = False


class Events:
    """The handler of ``GET /v1/events``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/v1/events", self._events, allow_head=False)]

    async def _events(self, request: web.Request) -> web.StreamResponse:
        query = read_query(request, EventQuery)
        readings = self._readings((await self._pool.record(query.job)).job if query.job else None)
        if query.follow:
            return await follow(request, readings, num=query.tail, pool=self._pool)
        entries, _ = await newest(readings, query.tail)
        return answer(EventList(events=tuple(entry.view for entry in entries)))

    def _readings(self, job: str | None) -> list[Reading[Any, EventView]]:
        bus = self._pool.bus
        if job is None:
            return [Reading("events", bus.read_stream(EVENTS, model_of), _event)]
        of_job = bus.read_stream(EVENTS, model_of, subject=job_events(job))
        told = bus.read_stream(REPORTS, Report, subject=reports_of(job))
        progress = bus.read_stream(PROGRESS, Report, subject=report(job, "progress"))
        return [
            Reading("events", of_job, _event),
            Reading("reports", told, _report),
            Reading("progress", progress, _progress),
        ]


def _event(received: Received[BaseModel]) -> tuple[EventView]:
    return (_view("events", received),)


def _report(received: Received[Report]) -> tuple[EventView]:
    return (_view("reports", received),)


def _progress(received: Received[Report]) -> tuple[EventView]:
    return (_view("progress", received),)


def _view(stream: Literal["events", "reports", "progress"], received: Received[Any]) -> EventView:
    assert received.sequence is not None
    assert received.stored is not None
    return EventView(
        stream=stream,
        sequence=received.sequence,
        time=received.stored,
        subject=received.subject,
        data=received.message.model_dump(mode="json"),
    )
