"""The routes of the API, and its server."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from opentelemetry.trace import Span, SpanKind

from resile_shared.errors import UsageError
from resile_shared.http.server import listening
from resile_shared.readiness import Readiness
from resile_shared.telemetry.traces import continued, fail, of_caller

from .access import GUARDED, guarded
from .datasets import DatasetViews
from .downloads import Downloads, Models
from .events import Events
from .hosts import Hosts
from .jobs import Jobs
from .logs import Logs
from .operations import routes_of
from .packages import Packages
from .page import Page
from .policy import Policy, Tenants
from .pool import Pool
from .problems import Handler, ProblemError, problems
from .requests import MAX_BODY_BYTES
from .services import CALLS, Services
from .sessions import Sessions
from .traces import ATTACKS, TraceViews
from .usage import Slots, Usage
from .webhooks import Webhooks

logger = logging.getLogger(__name__)

STOP_SECONDS = 3.0
UNTRACED = ("", ATTACKS, CALLS)
"""Routes of requests that change nothing of the pool: none, what is added to a trace, and requests to services."""
PARTS = (
    *(Jobs, Hosts, Policy, Tenants, Usage, Slots, Packages),
    *(Downloads, Events, Logs, Models, DatasetViews, Webhooks, TraceViews, Services),
)


def application(pool: Pool, *, token: str | None) -> web.Application:
    """Return the web application."""

    @web.middleware
    async def require_loaded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(GUARDED) and not pool.has_caught_up:
            raise ProblemError("unavailable", "the monitor is starting and loads the stored state: try again")
        return await handler(request)

    @web.middleware
    async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        if request.method not in ("POST", "PUT", "DELETE") or route in UNTRACED:
            return await handler(request)
        attributes = {"http.request.method": request.method, "http.route": route, "url.path": request.path}
        if job := request.match_info.get("job"):
            attributes["job"] = job
        name = f"{request.method} {route}"
        with continued(name, of_caller(request.headers), attributes, kind=SpanKind.SERVER) as span:
            response = await handler(request)
            _note_status(span, response)
            return response

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def readyz(_: web.Request) -> web.Response:
        is_ready = pool.has_caught_up
        return Readiness.of(pool.bus, is_ready=is_ready, storage_fault=pool.storage_probe.fault).response()

    async def close(_: web.Application) -> None:
        pool.closing.set()

    sessions = Sessions(token)
    made = web.Application(
        middlewares=[pool.metrics.measure, problems, guarded(token, sessions), require_loaded, traced],
        client_max_size=MAX_BODY_BYTES,
    )
    made.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    made.add_routes(sessions.routes())
    made.add_routes(Page().routes())
    for part in PARTS:
        made.add_routes(routes_of(part(pool)))
    made.on_shutdown.append(close)
    return made


def _note_status(span: Span, response: web.StreamResponse) -> None:
    """Record the status of a response; one of 500 or more is an error of the server."""
    span.set_attribute("http.response.status_code", response.status)
    if response.status >= 500:
        fail(span, str(response.status), response.reason or "")


@asynccontextmanager
async def serving(served: web.Application, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve requests; yields the URL. Raises UsageError if the address is not available."""
    server = listening(served, host=host, port=port, guarded=GUARDED, stop_seconds=STOP_SECONDS, cancels_handlers=True)
    async with AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(server)
        except OSError as error:
            raise UsageError(
                f"--api-port: cannot listen on {host}:{port}: {error.strerror}: choose another port"
            ) from error
        logger.info("API listening url=%s", url)
        yield url
