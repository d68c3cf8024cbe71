"""Fixtures: a real nats-server or S3 server for one test, on a free port."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from resile.chaos.s3_server import S3Server
from resile_shared.bus.client import Bus
from resile_shared.bus.credentials import read_credentials
from resile_shared.bus.nats_server import NatsServer


class Pool:
    """A bus server, and connections to it in any role."""

    def __init__(self, server: NatsServer, stack: AsyncExitStack) -> None:
        self.server = server
        self._stack = stack

    async def bus(self, role: str, *, service: str | None = None) -> Bus:
        """Connect as ``role``; closed with the fixture. Registry or scheduler first: they create the streams."""
        bus = await Bus.open(read_credentials(self.server.credentials(role)), service=service or role)
        self._stack.push_async_callback(bus.close)
        return bus

    async def crash(self) -> None:
        """``kill -9`` the server, and start it again on the same port and stores."""
        await self.kill()
        await self.server.start()

    async def back_up(self) -> None:
        """Copy the stores of the server, which is stopped meanwhile."""
        await self.server.stop()
        await asyncio.to_thread(shutil.copytree, self._stores, self._backup)
        await self.server.start()

    async def restore(self) -> None:
        """Go back to the stores as they were when they were copied."""
        await self.server.stop()
        await asyncio.to_thread(shutil.rmtree, self._stores)
        await asyncio.to_thread(shutil.copytree, self._backup, self._stores)
        await self.server.start()

    @property
    def _stores(self) -> Path:
        return self.server.folder / "jetstream"

    @property
    def _backup(self) -> Path:
        return self.server.folder / "backup"

    async def kill(self) -> None:
        """``kill -9`` the server."""
        process = self.server.process
        if process is None:
            raise RuntimeError("the server was never started")
        process.kill()
        await process.wait()


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    """A running nats-server with all roles."""
    server = NatsServer(tmp_path / "bus")
    await server.start()
    try:
        async with AsyncExitStack() as stack:
            yield Pool(server, stack)
    finally:
        await server.stop()


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A running S3 server; the environment holds its credentials and address."""
    server = S3Server(tmp_path / "s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    try:
        server.start()
        yield server
    finally:
        server.kill()
