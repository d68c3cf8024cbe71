"""Handlers for the changes of jobs, and the steps of each."""

from aiohttp import web

from resile_shared.api import ChangeList

from ..changes import changes_of
from .pool import Pool
from .problems import ProblemError
from .requests import answer


class TraceViews:
    """The handlers of ``/v1/jobs/{job}/changes`` and ``/v1/traces/{trace}``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/v1/jobs/{job}/changes", self._changes), web.get("/v1/traces/{trace}", self._trace)]

    async def _changes(self, request: web.Request) -> web.Response:
        record = await self._pool.record(request.match_info["job"])
        history = await self._pool.traced_history(record)
        return answer(ChangeList(changes=changes_of(record.job, record.spec.name, history, self._pool.traces)))

    async def _trace(self, request: web.Request) -> web.Response:
        name = request.match_info["trace"]
        view = self._pool.traces.view(name)
        if view is None:
            raise ProblemError(
                "unknown",
                f"the steps of trace {name[:32]} are not kept: this monitor remembers the newest since its own start; "
                "a collector keeps them longer (docs/traces.md)",
            )
        return answer(view)
