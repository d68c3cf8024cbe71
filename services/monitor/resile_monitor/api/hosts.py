"""Hosts: looking at them, and draining one."""

from aiohttp import web

from resile_shared.api import DrainHost, Empty
from resile_shared.messages.commands import HostDrain

from .pool import Pool
from .requests import answer, read_body, read_key


class Hosts:
    """The handlers below ``/v1/hosts``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/v1/hosts", self._list),
            web.get("/v1/hosts/{host}", self._view),
            web.post("/v1/hosts/{host}/drain", self._drain),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        return answer(self._pool.projection.hosts())

    async def _view(self, request: web.Request) -> web.Response:
        return answer(await self._pool.host(request.match_info["host"]))

    async def _drain(self, request: web.Request) -> web.Response:
        body = await read_body(request, DrainHost)
        host = (await self._pool.host(request.match_info["host"])).id
        command = HostDrain(host_id=host, deadline_seconds=body.deadline_seconds)
        await self._pool.ask("host", "drain", command, target=host, key=read_key(request))
        return answer(Empty())
