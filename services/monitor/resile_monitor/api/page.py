"""The page: static files of the package `resile_monitor.page`, which use the API as any other client does."""

import hashlib
from importlib import resources

from aiohttp import web

from .problems import ProblemError

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page:
    """The handlers of ``/`` and ``/page/{file}``. What they send holds no secret, so it needs no token."""

    def __init__(self) -> None:
        folder = resources.files("resile_monitor") / "page"
        self._files = {
            file.name: _File(file.read_bytes(), content_type)
            for file in folder.iterdir()
            if (content_type := _TYPES.get("." + file.name.rpartition(".")[2]))
        }

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.get("/", self._root), web.get("/page/{file}", self._file)]

    async def _root(self, request: web.Request) -> web.Response:
        if "text/html" not in request.headers.get("Accept", ""):
            return web.json_response({"service": "resile", "api": "/v1", "docs": "docs/api.md"})
        return self._files["index.html"].response(request)

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        if name not in self._files:
            raise ProblemError("unknown", f"the page has no file {name[:100]}: open / instead")
        return self._files[name].response(request)


class _File:
    def __init__(self, body: bytes, content_type: str) -> None:
        self._body = body
        self._content_type = content_type
        self._tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'

    def response(self, request: web.Request) -> web.Response:
        headers = {**HEADERS, "ETag": self._tag}
        if request.headers.get("If-None-Match") == self._tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=self._body, headers=headers, content_type=self._content_type, charset="utf-8")
