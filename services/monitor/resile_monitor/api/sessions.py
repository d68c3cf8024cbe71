"""Browsers log on once: the token is exchanged for a cookie that scripts of the page cannot read.

The cookie holds a digest of the token, so every monitor of the pool accepts it, and nothing is stored. A browser sends
it with every request for this address, so requests that change something must come from the page itself (`Origin`).
"""

import hashlib
import hmac

from aiohttp import web
from pydantic import Field

from resile_shared.messages.message import Message

from .problems import ProblemError
from .requests import read_body

MAX_AGE_SECONDS = 30 * 24 * 3600
_SAFE = ("GET", "HEAD")


class Logon(Message):
    """The body of ``POST /session``."""

    token: str = Field(min_length=1, max_length=1000)


class Sessions:
    """The handlers of ``/session``, and the check of the cookie that they set."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.post("/session", self._log_on), web.delete("/session", self._log_off)]

    def is_of(self, request: web.Request) -> bool:
        """Whether ``request`` comes from a browser that has logged on. Raises ProblemError if not from the page."""
        if self._token is None:
            return False
        given = request.cookies.get(self._name(self._token), "")
        if not hmac.compare_digest(given.encode(errors="replace"), _digest(self._token).encode()):
            return False
        if request.method not in _SAFE:
            _check_is_from_page(request)
        return True

    async def _log_on(self, request: web.Request) -> web.Response:
        _check_is_from_page(request)
        body = await read_body(request, Logon)
        if self._token is not None:
            if not is_token(body.token, self._token):
                raise ProblemError("unauthorized", "wrong token: use the one in pool.json of the pool's home")
            response = web.Response(status=204)
            response.set_cookie(
                self._name(self._token),
                _digest(self._token),
                max_age=MAX_AGE_SECONDS,
                httponly=True,
                samesite="Strict",
                secure=request.secure,
            )
            return response
        return web.Response(status=204)

    async def _log_off(self, request: web.Request) -> web.Response:
        _check_is_from_page(request)
        response = web.Response(status=204)
        if self._token is not None:
            response.del_cookie(self._name(self._token))
        return response

    def _name(self, token: str) -> str:
        """Name the cookie after the pool: browsers share the cookies of all ports of a machine."""
        return f"resile-{_digest(token, 'name')[:8]}"


def is_token(given: str, token: str) -> bool:
    """Compare in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())


def _digest(token: str, purpose: str = "session") -> str:
    return hmac.new(token.encode(), f"resile {purpose}".encode(), hashlib.sha256).hexdigest()


def _check_is_from_page(request: web.Request) -> None:
    # Browsers write both in the same form, without the port where it is the default of the scheme.
    _, _, origin = request.headers.get("Origin", "").partition("://")
    if not origin or origin.lower() != request.host.lower():
        raise ProblemError(
            "unauthorized", "a request with the cookie of the page must come from the page: send the token instead"
        )
