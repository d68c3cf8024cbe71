"""Handler for the slots that jobs held over time."""

from aiohttp import web
from pydantic import Field

from resile_shared.http.slots import SlotsView
from resile_shared.messages.message import Message

from .operations import Operation
from .pool import Pool, bus_timeout
from .requests import answer, read_query

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
