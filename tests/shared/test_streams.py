"""Streams as services create them, and as an earlier version has left them."""

import asyncio
from typing import Any

import orjson

from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.connection import Connection
from resile_shared.bus.credentials import read_credentials
from resile_shared.bus.envelope import Received
from resile_shared.bus.streams import provision
from resile_shared.bus.subjects import EVENTS, PROGRESS, STREAMS
from resile_shared.messages.hosts import HostHello
from resile_testing.fixtures import Pool
from resile_testing.waiting import PATIENCE_SECONDS, until

from .examples import hello
from .test_bus import running


async def configuration(bus: Bus, stream: str) -> dict[str, Any]:
    answer = await bus.connection.request(f"$JS.API.STREAM.INFO.{stream}", b"")
    stored: dict[str, Any] = orjson.loads(answer.data)["config"]
    return stored


async def test_events_and_reports_wait_for_the_disk_and_metrics_and_logs_do_not(pool: Pool) -> None:
    bus = await pool.bus("registry")
    modes = {stream.name: (await configuration(bus, stream.name)).get("persist_mode") for stream in STREAMS}
    assert {name for name, mode in modes.items() if mode == "async"} == {"progress", "logs"}


async def test_a_stream_of_an_earlier_version_is_used_as_it_is_written(pool: Pool) -> None:
    """The server refuses to change whether a stream waits for the disk, and what it refuses is asked again forever."""
    connection = await Connection.open(read_credentials(pool.server.credentials("registry")), name="earlier")
    earlier = {"name": PROGRESS.name, "subjects": list(PROGRESS.subjects), "storage": "file", "max_bytes": 1 << 20}
    await connection.request_store(f"$JS.API.STREAM.CREATE.{PROGRESS.name}", orjson.dumps(earlier))
    await connection.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        bus = await pool.bus("registry")
    assert (await configuration(bus, PROGRESS.name)).get("persist_mode") != "async"
    assert (await configuration(bus, PROGRESS.name))["max_bytes"] == PROGRESS.max_bytes
    async with asyncio.timeout(PATIENCE_SECONDS):
        await provision(bus.connection, bus._role)


async def test_who_has_read_beyond_the_end_of_a_stream_reads_what_comes(pool: Pool) -> None:
    """A stream that does not wait for the disk loses its end with the server's machine, and sequences come again."""
    bus = await pool.bus("registry")
    learner = await pool.bus("learner")
    received: list[int] = []

    async def read(message: Received[HostHello]) -> None:
        received.append(message.message.incarnation)

    async with running(bus.follow(EVENTS, HostHello, read, subjects=(subjects.HELLOS,), after=1000)):
        for incarnation in range(1, 4):
            await learner.publish(subjects.host_event("host-1", "hello"), hello(incarnation))
        await until(lambda: received[-1:] == [3])
    assert received == list(range(received[0], 4))
