"""Who may come in: whoever has the token; without one, only programs on this machine."""

import hmac

from aiohttp import web
from aiohttp.typedefs import Middleware
from yarl import URL

from ..settings import is_loopback
from .problems import Handler, ProblemError


def guarded(token: str | None) -> Middleware:
    """Return the middleware that lets nobody else use what lies below ``/v1``."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/v1"):
            if token is None:
                _check_is_local(request)
            else:
                _check_token(request, token)
        return await handler(request)

    return guard


def _check_token(request: web.Request, token: str) -> None:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise ProblemError("unauthorized", "a token is needed: send the header `Authorization: Bearer TOKEN`")
    if not hmac.compare_digest(given.strip().encode(errors="replace"), token.encode()):
        raise ProblemError("unauthorized", "the token is not that of this pool: pool.json in the pool's home has it")


def _check_is_local(request: web.Request) -> None:
    """Refuse what a page in a browser on this machine sends on behalf of another site."""
    try:
        host = URL(f"http://{request.host}").host or ""
    except ValueError:
        host = ""
    origin = request.headers.get("Origin", f"http://{request.host}")
    if not is_loopback(host) or origin != f"http://{request.host}":
        raise ProblemError("unauthorized", "this monitor has no token, so it only answers programs on its own machine")
