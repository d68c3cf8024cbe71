"""Handlers for the changes of jobs, the steps of each, and the attacks that are known to have caused them."""

from aiohttp import web
from opentelemetry.context import Context

from resile_shared.http.api import ChangeList, ChangeView, Empty, NewAttack, TraceView
from resile_shared.telemetry.traces import before, begin, context_of, end

from ..changes import ATTACK, changes_of
from ..trace_urls import url_of
from .operations import Operation
from .pool import Pool
from .problems import ProblemError
from .requests import answer, read_body

ATTACKS = "/v1/traces/{trace}/attacks"


class TraceViews:
    """The handlers of ``/v1/jobs/{job}/changes``, and those below ``/v1/traces/{trace}``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/jobs/{job}/changes", "What changed, how long it took, and why", ChangeList)
    async def _changes(self, request: web.Request) -> web.Response:
        record = await self._pool.record(request.match_info["job"])
        history = await self._pool.traced_history(record)
        changes = changes_of(record.job, record.spec.name, history, self._pool.traces)
        return answer(ChangeList(changes=tuple(map(self._linked, changes))))

    def _linked(self, change: ChangeView) -> ChangeView:
        url = url_of(change.trace, self._pool.trace_url)
        return change.model_copy(update={"url": url}) if url else change

    @Operation("get", "/v1/traces/{trace}", "The steps of one change", TraceView)
    async def _trace(self, request: web.Request) -> web.Response:
        name = request.match_info["trace"]
        view = self._pool.traces.view(name)
        if view is None:
            raise _not_kept(name)
        return answer(view)

    @Operation(
        "post",
        ATTACKS,
        "Add an attack to the change it caused",
        Empty,
        body=NewAttack,
        is_keyed=False,
    )
    async def _attack(self, request: web.Request) -> web.Response:
        name = request.match_info["trace"]
        body = await read_body(request, NewAttack)
        first = self._pool.traces.first(name)
        if first is None:
            raise _not_kept(name)
        links, change = before(context_of({"traceparent": f"00-{name}-{first.id}-01"}))
        about = {"job": body.job, "attack": body.attack}
        span = begin(ATTACK, Context(), {**change, **about}, begun=body.begin, links=links)
        end(span, ended=body.begin + body.seconds)
        return answer(Empty())


def _not_kept(name: str) -> ProblemError:
    return ProblemError(
        "unknown",
        f"the steps of trace {name[:32]} are not kept: this monitor remembers the newest since its own start; "
        "a collector keeps them longer (docs/traces.md)",
    )
