"""Handler for what jobs and tenants have used."""

import time

from aiohttp import web
from pydantic import Field

from resile_shared.http.api import UsageView
from resile_shared.messages.message import Id, Message, at
from resile_shared.messages.usage import HOURS_KEPT

from ..usage import usage_view
from .operations import Operation
from .pool import Pool
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
