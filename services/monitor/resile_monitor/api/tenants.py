"""Handlers for the tenants of the pool: list, change, delete."""

from aiohttp import web

from resile_shared.http.api import NewTenant
from resile_shared.messages.commands import TenantDelete, TenantSet

from .pool import Pool
from .requests import answer, build, read_body, read_key


class Tenants:
    """The handlers of ``/v1/tenants``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/v1/tenants", self._list),
            web.put("/v1/tenants/{tenant}", self._change),
            web.delete("/v1/tenants/{tenant}", self._delete),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        return answer(await self._pool.tenants())

    async def _change(self, request: web.Request) -> web.Response:
        body = await read_body(request, NewTenant)
        command = build(TenantSet, {"tenant_id": request.match_info["tenant"], **body.model_dump()})
        return answer(await self._pool.change_tenant("set", command, key=read_key(request)))

    async def _delete(self, request: web.Request) -> web.Response:
        command = build(TenantDelete, {"tenant_id": request.match_info["tenant"]})
        return answer(await self._pool.change_tenant("delete", command, key=read_key(request)))
