"""Serves an aiohttp application to untrusted clients.

The number of connections is limited, in total and for each address. When a limit is reached, the connection that has
been idle for longest makes room for the new one, so that a client that only connects keeps nobody out; if all are busy
with requests, the new one is closed. Requests that anyone may send do not make a connection busy: their bodies and
answers may be slow on purpose. Each request must arrive within a time limit.
"""

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from .api import Problem

MAX_CONNECTIONS = 512
MAX_PER_ADDRESS = 256
REQUEST_SECONDS = 20.0
"""Seconds within which the first request must arrive after connecting, headers included, and each later one."""
LINGER_SECONDS = 2.0
BODY_SECONDS = 10.0
"""Seconds within which the body of a request must arrive, or a piece of a large one."""
WRITE_SECONDS = 60.0
"""Seconds within which a client must accept a piece of a response."""
_OF_CLIENTS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
"""Errors that clients cause; they are not logged."""


class Admission:
    """Decides which connections are kept. Makes the protocols of a server."""

    def __init__(self, *, max_connections: int, max_per_address: int, guarded: str) -> None:
        self._guarded = guarded
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._addresses: dict[asyncio.Transport, str] = {}
        """The address of each connection; those that have been idle for longest come first."""
        self._busy: set[asyncio.Transport] = set()

    def admit(self, transport: asyncio.Transport) -> bool:
        """Return whether a new connection is kept; another may be closed for it."""
        self._addresses = {known: address for known, address in self._addresses.items() if not known.is_closing()}
        self._busy &= self._addresses.keys()
        address = str((transport.get_extra_info("peername") or ("",))[0])
        neighbours = [known for known, other in self._addresses.items() if other == address]
        for among, limit in ((neighbours, self._max_per_address), (list(self._addresses), self._max_connections)):
            if len(among) >= limit and not self._close_idle(among):
                return False
        self._addresses[transport] = address
        return True

    @web.middleware
    async def mark_busy(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keep the connection of a request to a guarded path open while it is handled."""
        transport = cast(asyncio.Transport, request.transport)
        if request.path.startswith(self._guarded):
            self._busy.add(transport)
        try:
            return await handler(request)
        finally:
            self._busy.discard(transport)
            if transport in self._addresses:
                self._addresses[transport] = self._addresses.pop(transport)

    def _close_idle(self, among: list[asyncio.Transport]) -> bool:
        for transport in among:
            if transport not in self._busy:
                transport.abort()
                return True
        return False


class _Newcomer(asyncio.Protocol):
    """A connection until it is admitted."""

    def __init__(self, admission: Admission, server: web.Server) -> None:
        self._admission = admission
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.Transport, transport)  # no subclass of it in uvloop
        if not self._admission.admit(connection):
            connection.abort()
            return
        protocol = self._server()
        connection.set_protocol(protocol)
        protocol.connection_made(connection)


def _expecting(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Refuse expectations of requests but ``100-continue``; aiohttp itself fails on one that is not UTF-8."""

    async def checked(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "100-continue").lower() == "100-continue":
            return await handle(request)
        status = HTTPStatus.EXPECTATION_FAILED
        problem = Problem(
            title=status.phrase,
            status=status,
            detail="unknown Expect: leave it out, or send 100-continue",
            code="malformed",
        )
        return web.Response(body=problem.model_dump_json(), status=status, content_type="application/problem+json")

    return checked


def _logger() -> logging.Logger:
    """The logger of a server, which is silent about malformed requests and lost clients: anyone could fill the disk."""
    logger = logging.getLogger(f"{__name__}.requests")
    logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _OF_CLIENTS)))
    return logger


@asynccontextmanager
async def listening(
    application: web.Application,
    *,
    host: str,
    port: int,
    guarded: str = "/",
    stop_seconds: float = 60.0,
    cancels_handlers: bool = False,
) -> AsyncIterator[str]:
    """Serve; yields the URL. Raises OSError.

    ``guarded`` is the prefix of the paths to which the application admits only some clients. ``cancels_handlers``:
    whether handlers are cancelled when their clients disconnect.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    admission = Admission(
        max_connections=min(MAX_CONNECTIONS, descriptors // 2),
        max_per_address=min(MAX_PER_ADDRESS, descriptors // 4),
        guarded=guarded,
    )
    application.middlewares.insert(0, admission.mark_busy)
    runner = web.AppRunner(
        application,
        access_log=None,
        handler_cancellation=cancels_handlers,
        shutdown_timeout=stop_seconds,
        keepalive_timeout=REQUEST_SECONDS,
        logger=_logger(),
        auto_decompress=False,
        lingering_time=LINGER_SECONDS,
    )
    await runner.setup()
    try:
        server = runner.server
        assert server is not None
        server.request_handler = _expecting(server.request_handler)
        sockets = await asyncio.get_running_loop().create_server(
            lambda: _Newcomer(admission, server), host, port, backlog=128
        )
        try:
            name, number = sockets.sockets[0].getsockname()[:2]
            yield f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
        finally:
            sockets.close()
    finally:
        await runner.cleanup()
