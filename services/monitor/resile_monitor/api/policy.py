"""Handlers for the policy of the pool: show, change."""

from aiohttp import web

from resile_shared.http.api import NewPolicy, PolicyView
from resile_shared.messages.commands import PoolPolicy

from .operations import Operation
from .pool import Pool
from .requests import answer, read_body, read_key


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
