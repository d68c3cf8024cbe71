"""A connection is closed without an error, whatever becomes of NATS meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from resile_shared.bus import connection
from resile_shared.bus.connection import Connection
from resile_shared.bus.credentials import Credentials

INFO = {"server_id": "x", "version": "2.10.0", "proto": 1, "host": "127.0.0.1", "port": 0, "max_payload": 1 << 20}


@asynccontextmanager
async def connected(*, ends_at: bytes = b"", is_mute_at: bytes = b"") -> AsyncIterator[Connection]:
    """A connection to a server that ends, or says nothing more, when it has received some words."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO " + json.dumps({**INFO, "headers": True}).encode() + b"\r\n")
        is_mute = False
        while line := await reader.readline():
            if ends_at and line.startswith(ends_at):
                writer.close()
                server.close()
                return
            is_mute = is_mute or bool(is_mute_at and line.startswith(is_mute_at))
            if line.startswith(b"PING") and not is_mute:
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    made = await Connection.open(Credentials(url=f"nats://127.0.0.1:{port}", user="a", password="b"), name="test")
    try:
        yield made
    finally:
        server.close()


async def ignore(message: object) -> None: ...


async def test_nats_may_end_just_before_it() -> None:
    async with connected(ends_at=b"HPUB") as opened:
        await opened.subscribe("subject", ignore)
        await opened.send("subject", b"", headers={"name": "value"})
        while not opened._client.is_reconnecting:  # noqa: ASYNC110 - it has to be caught at once
            await asyncio.sleep(0)
        await opened.close()
        assert opened._client.is_closed


async def test_nats_may_stop_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "DRAIN_SECONDS", 0.2)
    async with connected(is_mute_at=b"SUB") as opened:
        await opened.subscribe("subject", ignore)
        await opened.close()
        assert opened._client.is_closed
