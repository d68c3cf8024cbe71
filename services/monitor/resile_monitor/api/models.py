"""The handler of ``GET /v1/models``."""

from aiohttp import web

from resile_shared.http.api import ModelList

from ..models import models
from .operations import Operation
from .pool import Pool
from .requests import answer


class Models:
    """Lists the models that completed jobs have left; `Downloads` sends them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/models", "The models of completed jobs", ModelList)
    async def _list(self, _: web.Request) -> web.Response:
        return answer(models(self._pool.projection.records()))
