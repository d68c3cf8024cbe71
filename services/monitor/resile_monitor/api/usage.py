"""Handlers for what was used: by jobs and tenants in all, and the slots that jobs held over time."""

import time

from aiohttp import web
from pydantic import Field

from resile_shared.http.api import UsageView
from resile_shared.http.slot_history import SlotsView
from resile_shared.messages.message import Id, Message, at
from resile_shared.messages.usage import HOURS_KEPT

from ..views import usage_view
from .operations import Operation
from .pool import Pool, bus_timeout
from .requests import answer, read_query


class UsageQuery(Message):
    """The parameters of ``GET /v1/usage``."""

    tenant: Id | None = None
    hours: int | None = Field(
        default=None,
        ge=1,
        le=HOURS_KEPT - 1,
        description="only the slot-hours of this many last hours; null: of all time",
    )


class Usage:
    """The handler of ``/v1/usage``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/usage", "What was used, by tenant and job", UsageView, query=UsageQuery)
    async def _view(self, request: web.Request) -> web.Response:
        query = read_query(request, UsageQuery)
        removed = await self._pool.removed_usage()
        records = self._pool.projection.records()
        return answer(usage_view(records, removed, tenant=query.tenant, hours=query.hours, now=at(time.time())))


DAY_SECONDS = 86_400


class SlotsQuery(Message):
    """The parameters of ``GET /v1/slots``."""

    seconds: int = Field(
        default=DAY_SECONDS, ge=1, le=30 * DAY_SECONDS, description="how long before the newest event it begins"
    )


class Slots:
    """The handler of ``/v1/slots``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/slots", "Who held how many slots over time, thinned", SlotsView, query=SlotsQuery)
    async def _view(self, request: web.Request) -> web.Response:
        query = read_query(request, SlotsQuery)
        async with bus_timeout("the monitor still reads the events that were stored before it started: try again"):
            return answer(await self._pool.slots.view(seconds=query.seconds))
