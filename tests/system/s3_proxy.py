"""A proxy in front of an S3 server, whose answers a test can change."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import aiohttp
from aiohttp import web

_ERROR = "<Error><Code>{code}</Code><Message>as the test has it</Message></Error>"
_HOP = ("content-length", "transfer-encoding", "connection", "content-encoding")


class S3Proxy:
    """Passes each request on, unless ``error`` has the status and the code with which it answers instead."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.url = ""
        self.error: tuple[int, str] | None = None
        self.num_refused = 0

    @classmethod
    @contextmanager
    def before(cls, upstream: str) -> Iterator["S3Proxy"]:
        """Run a proxy in a thread while the block runs."""
        loop, proxy = asyncio.new_event_loop(), cls(upstream)
        with ThreadPoolExecutor(max_workers=1) as thread:
            loop.run_until_complete(proxy._start())
            serving = thread.submit(loop.run_forever)
            try:
                yield proxy
            finally:
                loop.call_soon_threadsafe(loop.stop)
                serving.result()
                loop.run_until_complete(proxy._stop())
                loop.close()

    async def _start(self) -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._http = aiohttp.ClientSession(auto_decompress=False)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._http.close()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.error is not None:
            self.num_refused += 1
            status, code = self.error
            return web.Response(status=status, text=_ERROR.format(code=code), content_type="application/xml")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url = self._upstream + request.raw_path  # with the header Host that the client has signed
        async with self._http.request(request.method, url, data=body or None, headers=headers) as answer:
            content = await answer.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            if request.method == "HEAD":
                return web.Response(
                    status=answer.status, headers={**kept, "Content-Length": answer.headers.get("Content-Length", "0")}
                )
            return web.Response(status=answer.status, body=content, headers=kept)
