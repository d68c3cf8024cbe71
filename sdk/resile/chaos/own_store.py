"""An S3 server that a campaign runs for its own pool: it is attacked like all else, and started again."""

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from .s3_server import S3Server


class OwnStore:
    """The server. It would die with the thread that starts it, so one thread starts it every time."""

    def __init__(self, server: S3Server, thread: ThreadPoolExecutor) -> None:
        self._server = server
        self._thread = thread

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path) -> AsyncIterator["OwnStore"]:
        """Run the server while the block runs; the environment holds its credentials and address."""
        server = S3Server(folder)
        os.environ.update(server.environment)
        with ThreadPoolExecutor(max_workers=1) as thread:
            store = cls(server, thread)
            try:
                await store.start()
                yield store
            finally:
                server.kill()
                for name in server.environment:
                    os.environ.pop(name, None)

    @property
    def url(self) -> str:
        """URL for the pool's storage."""
        return f"{self._server.url}/pool"

    @property
    def pid(self) -> int | None:
        """Its process."""
        return self._server.pid

    async def start(self) -> None:
        """Start it, or start it again after it was killed."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._start)

    def _start(self) -> None:
        self._server.kill()  # and wait for it
        self._server.start()
