"""Access control: requests need the token, or the cookie it was exchanged for.

A monitor without a token serves only programs on its own machine.
"""

from aiohttp import web
from aiohttp.typedefs import Middleware
from yarl import URL

from ..settings import is_loopback
from .problems import Handler, ProblemError
from .sessions import Sessions, is_token

GUARDED = "/v1"
"""Paths that begin with this need the token."""


def guarded(token: str | None, sessions: Sessions) -> Middleware:
    """Return the middleware that guards all paths below ``/v1``."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(GUARDED):
            if token is None:
                _check_is_local(request)
            elif "Authorization" in request.headers or not sessions.is_of(request):
                _check_token(request, token)
        return await handler(request)

    return guard


def _check_token(request: web.Request, token: str) -> None:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise ProblemError("unauthorized", "missing token: send the header `Authorization: Bearer TOKEN`")
    if not is_token(given, token):
        raise ProblemError("unauthorized", "wrong token: use the one in pool.json of the pool's home")


def _check_is_local(request: web.Request) -> None:
    """Reject requests that a browser on this machine sends for another site."""
    try:
        host = URL(f"http://{request.host}").host or ""
    except ValueError:
        host = ""
    origin = request.headers.get("Origin", f"http://{request.host}")
    if not is_loopback(host) or origin != f"http://{request.host}":
        raise ProblemError(
            "unauthorized",
            "this monitor has no token and serves only programs on its own machine: start it with --token-file",
        )
