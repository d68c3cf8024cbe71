"""Handlers for the policy of the pool: show, change."""

from aiohttp import web

from resile_shared.http.api import NewPolicy
from resile_shared.messages.commands import PoolPolicy

from .pool import Pool
from .requests import answer, read_body, read_key


class Policy:
    """The handlers of ``/v1/policy``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/v1/policy", self._view), web.put("/v1/policy", self._change)]

    async def _view(self, _: web.Request) -> web.Response:
        return answer(await self._pool.policy())

    async def _change(self, request: web.Request) -> web.Response:
        body = await read_body(request, NewPolicy)
        command = PoolPolicy(policy=body.policy, preemption=body.preemption)
        return answer(await self._pool.change_policy(command, key=read_key(request)))
