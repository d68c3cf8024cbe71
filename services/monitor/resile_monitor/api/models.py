"""The handler of ``GET /v1/models``."""

from aiohttp import web

from ..models import models
from .pool import Pool
from .requests import answer


class Models:
    """Lists the models that completed jobs have left; `Downloads` sends them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/v1/models", self._list)]

    async def _list(self, _: web.Request) -> web.Response:
        return answer(models(self._pool.projection.records()))
