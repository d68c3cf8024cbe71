"""Whether a machine is reached at an address: it listens there and says its name to whoever connects.

An address alone does not identify a machine. 127.0.0.1 is every machine, and 172.17.0.2 a container on many.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

from .errors import UsageError

CONNECT_SECONDS = 3.0
MAX_NAME = 64


@asynccontextmanager
async def listening(address: str, name: str) -> AsyncIterator[int]:
    """Say ``name`` to whoever connects to ``address``; yields the port.

    Raises UsageError if this machine has no such address.
    """

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{name}\n".encode())
        writer.close()

    try:
        server = await asyncio.start_server(answer, address, 0)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"--address: workers cannot listen on {address} ({why}): use one of this machine") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def obstacle(address: str, port: int, *, name: str) -> str:
    """Return why the machine that says ``name`` is not reached at ``address``; empty: it is."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                said = await reader.read(MAX_NAME + 1)
            finally:
                writer.close()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return "" if said == f"{name}\n".encode() else "another machine answers"


def is_loopback(address: str) -> bool:
    """Whether only processes of the same machine reach ``address``."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def is_own(address: str) -> bool:
    """Whether ``address`` is one of this machine."""
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return False
    return True
