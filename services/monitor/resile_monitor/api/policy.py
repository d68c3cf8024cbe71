"""Handlers for how the pool is shared: its policy, and its tenants."""

from aiohttp import web

from resile_shared.http.api import NewPolicy, NewTenant, PolicyView, TenantList
from resile_shared.messages.commands import PoolPolicy, TenantDelete, TenantSet

from .operations import Operation
from .pool import Pool
from .requests import answer, build, read_body, read_key


class Policy:
    """The handlers of ``/v1/policy``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/policy", "How jobs share the slots of the pool", PolicyView)
    async def _view(self, _: web.Request) -> web.Response:
        return answer(await self._pool.policy())

    @Operation("put", "/v1/policy", "Change how jobs share slots", PolicyView, body=NewPolicy)
    async def _change(self, request: web.Request) -> web.Response:
        body = await read_body(request, NewPolicy)
        command = PoolPolicy(policy=body.policy, preemption=body.preemption)
        return answer(await self._pool.change_policy(command, key=read_key(request)))


class Tenants:
    """The handlers of ``/v1/tenants``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/tenants", "The tenants of the pool, and what each gets", TenantList)
    async def _list(self, _: web.Request) -> web.Response:
        return answer(await self._pool.tenants())

    @Operation("put", "/v1/tenants/{tenant}", "Change what a tenant gets", TenantList, body=NewTenant)
    async def _change(self, request: web.Request) -> web.Response:
        body = await read_body(request, NewTenant)
        command = build(TenantSet, {"tenant_id": request.match_info["tenant"], **body.model_dump()})
        return answer(await self._pool.change_tenant("set", command, key=read_key(request)))

    @Operation("delete", "/v1/tenants/{tenant}", "Reset a tenant to the defaults", TenantList)
    async def _delete(self, request: web.Request) -> web.Response:
        command = build(TenantDelete, {"tenant_id": request.match_info["tenant"]})
        return answer(await self._pool.change_tenant("delete", command, key=read_key(request)))
