"""Whatever comes over HTTP: the real monitor answers at once, never with a fault of its own, and does not grow."""

import asyncio
import http.client
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode

import hypothesis.strategies as st
import orjson
import psutil
import pytest
from hypothesis import given

from resile_monitor.openapi import OPERATIONS, Operation
from resile_shared.bus.subjects import LEASE, LEASE_KEY
from resile_shared.messages.pool import Lease
from tests.monitor.conftest import monitors, pool, scene
from tests.monitor.examples import PACKAGE, host, job
from tests.monitor.monitors import TOKEN, Monitor, Monitors, Scene
from tests.monitor.test_commands import Answering

from .documents import ANYTHING, allowed, nearly
from .fuzzing import SECONDS, fuzzed

__all__ = ["monitors", "pool", "scene"]

MAX_SECONDS = 20
MAX_GROWTH_BYTES = 300 << 20
MAX_MORE_DESCRIPTORS = 50
_VALUES = st.text(max_size=30) | st.sampled_from(
    ["job-1", "host-1", "..", "%2e%2e", "\x00", "\ud800", "a" * 5000, "0", "-1"]
)
_HEADERS = {
    "Idempotency-Key": st.text("ab \x7f\u00fc", max_size=300),
    "Last-Event-ID": st.sampled_from(["logs:1", "events:0", "logs:99999999999999999999", ":", "x", "logs:1.5,x:2"]),
    "Content-Type": st.sampled_from(["application/json", "text/plain", "multipart/form-data", "x"]),
    "Content-Encoding": st.sampled_from(["gzip", "deflate", "br", "identity", "x"]),
    "Accept": st.sampled_from(["text/event-stream", "*/*", "x"]),
    "Expect": st.sampled_from(["100-continue", "x"]),
    "Range": st.just("bytes=5-1"),
    "traceparent": st.sampled_from(["00-" + "a" * 32 + "-" + "b" * 16 + "-01", "x", "00-0-0-0"]),
    "Authorization": st.sampled_from(["Bearer wrong", "Basic x", "Bearer", ""]),
    "Transfer-Encoding": st.sampled_from(["chunked", "x"]),
    "Content-Length": st.sampled_from(["0", "3", "-1", "99999999999999999999", "x"]),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, dict[str, str], bytes]:
    """Requests as the document describes them, and others that are nearly so."""
    operation = draw(st.sampled_from(OPERATIONS))
    path = operation.path
    for name, values in (("{job}", ["job-1", "digits"]), ("{host}", ["host-1"])):
        if name in path:
            path = path.replace(name, _quoted(draw(st.sampled_from(values) | _VALUES)))
    if operation.query and draw(st.booleans()):
        query = draw(nearly(operation.query.model_json_schema()))
        if isinstance(query, dict):
            path += "?" + urlencode({name: _quoted(str(value)) for name, value in query.items()})
    names = draw(st.sets(st.sampled_from(sorted(_HEADERS)), max_size=2))
    headers = {name: draw(_HEADERS[name]) for name in sorted(names)}
    method = (
        operation.method.upper() if draw(st.integers(0, 9)) else draw(st.sampled_from(["PUT", "HEAD", "OPTIONS", "X"]))
    )
    return method, path, headers, draw(_body(operation))


def _body(operation: Operation) -> st.SearchStrategy[bytes]:
    if operation.body is None:
        return st.just(b"")
    if isinstance(operation.body, str):
        return st.binary(max_size=300)
    schema = operation.body.model_json_schema()
    spec = {"package": PACKAGE} if "package" in schema.get("properties", {}) else {}
    documents = allowed(schema).map(lambda document: {**document, **spec}) | nearly(schema) | ANYTHING
    return documents.map(_json) | st.binary(max_size=100)


def _json(document: Any) -> bytes:
    try:
        return orjson.dumps(document)
    except (TypeError, ValueError):
        return repr(document).encode(errors="replace")


def _quoted(text: str) -> str:
    return quote(text.encode(errors="surrogatepass"), safe="")


def send(monitor: Monitor, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str]:
    """Send a request; return the status and the type of the answer. An answer without an end is not read."""
    address, port = monitor.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(address, int(port), timeout=MAX_SECONDS)
    sent = {"Authorization": f"Bearer {TOKEN}", **headers}
    if "Content-Length" in headers or "Transfer-Encoding" in headers:
        sent["Connection"] = "close"
    try:
        connection.putrequest(method, path)
        for name, value in {"Content-Length": str(len(body)), **sent}.items():
            connection.putheader(name, value.encode("utf-8"))
        connection.endheaders(body)
        assert connection.sock is not None
        with suppress(OSError):  # it may have answered already
            connection.sock.shutdown(socket.SHUT_WR)
        answer = connection.getresponse()
        kind = answer.headers.get_content_type()
        if kind != "text/event-stream":
            answer.read()
        return answer.status, kind
    finally:
        connection.close()


@st.composite
def raw(draw: st.DrawFn) -> bytes:
    """Bytes that are nearly a request."""
    method, path, headers, body = draw(requests())
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    content = bytearray("\r\n".join([*lines, "", ""]).encode(errors="replace") + body)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content)))
        content[place : place + draw(st.integers(0, 5))] = draw(st.binary(max_size=10))
    return bytes(content)


def send_raw(monitor: Monitor, content: bytes) -> bytes:
    """Send bytes and nothing more; return the first line of the answer, or nothing."""
    address, port = monitor.url.removeprefix("http://").split(":")
    with socket.create_connection((address, int(port)), timeout=MAX_SECONDS) as connection:
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(4096).partition(b"\r\n")[0]
        except ConnectionError:
            return b""


@fuzzed(examples=150)
@given(data=st.data())
def try_requests(monitor: Monitor, data: st.DataObject) -> None:
    method, path, headers, body = data.draw(requests())
    try:
        status, kind = send(monitor, method, path, headers, body)
    except (http.client.BadStatusLine, ConnectionError):
        return  # what the monitor takes for no request may be answered by closing the connection
    assert status < 500, (status, method, path)
    assert status < 400 or method in ("HEAD", "X") or kind in ("application/problem+json", "text/plain")


@fuzzed(examples=100)
@given(data=st.data())
def try_bytes(monitor: Monitor, data: st.DataObject) -> None:
    line = send_raw(monitor, data.draw(raw()))
    assert not line.startswith(b"HTTP/1.1 5"), line


@pytest.mark.timeout(0 if SECONDS else 180)
async def test_the_monitor_answers_whatever_it_is_asked(monitors: Monitors, scene: Scene) -> None:
    await Answering(scene).listen()
    await scene.scheduler.bucket(LEASE).create(LEASE_KEY, Lease(epoch=3, holder="scheduler", counter=0))
    await scene.store_job(job("job-1"))
    await scene.store_host(host())
    monitors.storage.put(PACKAGE, [b""])
    monitor = await monitors.start()
    process = psutil.Process(monitor.process.pid)
    before = process.memory_info().rss, process.num_fds()
    for attempt in _attempts():
        await asyncio.to_thread(attempt, monitor)
        await monitor.answers("/readyz", 200)
    assert process.memory_info().rss - before[0] < MAX_GROWTH_BYTES
    assert process.num_fds() - before[1] < MAX_MORE_DESCRIPTORS


def _attempts() -> Iterator[Any]:
    yield try_requests
    yield try_bytes
