"""What clients cannot do to a monitor: use up its connections, its time or its memory."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from resile_shared.http.api import JobList

from .monitors import TOKEN, Monitor, Monitors, Scene

NUM_IDLE = 1100
DESCRIPTORS = 1024


def limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


@asynccontextmanager
async def idle_connections(
    monitor: Monitor, num: int, *, says: bytes = b""
) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Open connections that send ``says`` and nothing more."""
    host, port = monitor.url.removeprefix("http://").split(":")
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(num):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(says)
            readers.append(reader)
        yield readers


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"POST /session HTTP/1.1\r\nHost: x\r\nOrigin: http://x\r\nContent-Length: 9\r\n\r\n",
    ],
)
async def test_connections_of_anyone_keep_nobody_out(monitors: Monitors, scene: Scene, says: bytes) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * DESCRIPTORS:
        pytest.skip("this test needs more descriptors itself")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * DESCRIPTORS), hard))
    monitor = await monitors.start(preexec_fn=limit_descriptors)
    async with idle_connections(monitor, NUM_IDLE, says=says) as readers:
        assert await monitor.get("/v1/jobs", JobList) == JobList(jobs=())
        at_end = sum(reader.at_eof() or reader.exception() is not None for reader in readers)
        assert at_end >= NUM_IDLE - DESCRIPTORS // 2, "they make room"
        assert await monitor.get("/v1/jobs", JobList) == JobList(jobs=())


async def test_a_connection_that_is_busy_makes_no_room(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start(preexec_fn=limit_descriptors)
    events = monitor.events("/v1/events?follow=true")
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    async with idle_connections(monitor, DESCRIPTORS // 2), monitor.http.get("/v1/jobs") as answer:
        assert answer.status == 200
    assert not first.done()
    first.cancel()


@pytest.mark.parametrize("path", ["/v1/jobs", "/nowhere"])
@pytest.mark.parametrize("expect", [b"nothing", b"100-cont\xbenue"])
async def test_an_unknown_expectation_is_refused(monitors: Monitors, scene: Scene, path: str, expect: bytes) -> None:
    monitor = await monitors.start()
    request = b"GET " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: " + expect + b"\r\n\r\n"
    async with idle_connections(monitor, 1, says=request) as (reader,):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 417 "), answer
    assert b'"code":"malformed"' in answer


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/packages"])
async def test_a_body_that_does_not_come_is_not_waited_for(monitors: Monitors, scene: Scene, path: str) -> None:
    monitor = await monitors.start()
    head = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n{{"
    async with idle_connections(monitor, 1, says=f"POST {path} {head}".encode()) as (reader,):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 "), answer
    assert b'"code":"timeout"' in answer


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/packages"])
async def test_a_body_that_is_no_http_is_the_clients_fault_and_fills_no_log(
    monitors: Monitors, scene: Scene, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    monitor = await monitors.start()
    head = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked\r\n\r\n"
    for chunk in ("2\r\n{}\r\nZZ\r\n", "-1\r\n", "fffffffffffffffffff\r\n"):
        async with idle_connections(monitor, 1, says=f"POST {path} {head}{chunk}".encode()) as (reader,):
            answer = await reader.read()
        assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 ")), answer
    assert "Traceback" not in capfd.readouterr().err
