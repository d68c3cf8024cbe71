"""What a service says of a collector that takes nothing: once, with the reason, and what that cost."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from resile_shared.telemetry.export_watch import REMIND_SECONDS, ExportWatch, WatchedExporter, without_credentials
from resile_shared.telemetry.exporters import Exports
from resile_shared.telemetry.traces import set_up_tracing
from resile_testing.collector import collecting, collecting_by_grpc

Place = Callable[[], AbstractContextManager[str]]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("resile")]


def exporting() -> tuple[Exports, TracerProvider]:
    exports = Exports("test")
    exported = exports.spans()
    assert exported is not None
    return exports, set_up_tracing("test", processors=(exported,))


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


@contextmanager
def nobody() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@contextmanager
def silence() -> Iterator[str]:
    """A server that takes requests and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def babble() -> Iterator[str]:
    """A server of another protocol."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                while True:
                    peer, _ = server.accept()
                    peer.recv(100_000)
                    peer.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
                    peer.close()
            except OSError:
                pass

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        serving.join()


@contextmanager
def of_grpc() -> Iterator[str]:
    with collecting_by_grpc() as collector:
        yield collector.url


@contextmanager
def of_http() -> Iterator[str]:
    with collecting() as collector:
        yield collector.url


@contextmanager
def no_url() -> Iterator[str]:
    yield "127.0.0.1:4318"


@contextmanager
def no_name() -> Iterator[str]:
    yield "http://collector.invalid:4318"


HTTP, GRPC = "http/protobuf", "grpc"


@pytest.mark.parametrize(
    ("protocol", "place", "reason"),
    [
        (HTTP, nobody, "connection refused: no collector listens there"),
        (GRPC, nobody, "connection refused: no collector listens there"),
        (HTTP, silence, "it does not answer in time"),
        (GRPC, silence, "it does not answer in time"),
        (HTTP, lambda: answering(404), "it answers that there is no such path: check that of the endpoint"),
        (HTTP, lambda: answering(401), "it refuses access: check OTEL_EXPORTER_OTLP_HEADERS"),
        (HTTP, lambda: answering(500), "it answers 500: is it a collector of OTLP?"),
        (HTTP, lambda: answering(503), "it is overloaded or not ready"),
        (
            HTTP,
            babble,
            "it does not speak HTTP, or closed the connection: is OTEL_EXPORTER_OTLP_PROTOCOL=grpc meant?",
        ),
        (
            HTTP,
            of_grpc,
            "it does not speak HTTP, or closed the connection: is OTEL_EXPORTER_OTLP_PROTOCOL=grpc meant?",
        ),
        (
            GRPC,
            of_http,
            "it does not speak OTLP over gRPC: is OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf, with its port, meant?",
        ),
        (HTTP, no_url, "the endpoint is not a URL: begin it with http:// or https://"),
        (HTTP, no_name, "its host name cannot be resolved"),
        (GRPC, no_name, "its host name cannot be resolved"),
    ],
)
def test_a_collector_that_takes_nothing_is_named_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str, place: Place, reason: str
) -> None:
    caplog.set_level(logging.INFO)
    with place() as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        exports, provider = exporting()
        provider.get_tracer("test").start_span("work").end()
        provider.force_flush()
        provider.shutdown()
    endpoint = url if protocol == GRPC else f"{url}/v1/traces"
    assert lines(caplog) == [
        f"exporting traces endpoint={endpoint} protocol={protocol}",
        f"cannot export traces endpoint={endpoint} lost=1: {reason}; training goes on",
    ]
    assert exports.num_lost() == {"traces": 1, "metrics": 0, "logs": 0}


class Unsteady:
    """An exporter that succeeds and fails as it is told to."""

    def __init__(self) -> None:
        self.result = SpanExportResult.FAILURE

    def export(self, batch: object) -> SpanExportResult:
        return self.result

    def shutdown(self) -> None:
        pass


def test_losses_are_repeated_once_in_a_while_and_their_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    watch = ExportWatch("traces", "http://me:hush@there", clock=lambda: now[0])
    inner = Unsteady()
    exporter = WatchedExporter(inner, watch)
    for at in (0.0, 5.0, REMIND_SECONDS - 1, REMIND_SECONDS, REMIND_SECONDS + 5):
        now[0] = at
        exporter.export(["span", "span"])
    assert exporter.is_failing
    inner.result = SpanExportResult.SUCCESS
    exporter.export(["span"])
    exporter.export(["span"])
    assert not exporter.is_failing
    inner.result = SpanExportResult.FAILURE
    exporter.export(["span"])
    reason = "no reason was given; training goes on"
    assert lines(caplog) == [
        f"cannot export traces endpoint=http://***@there lost=2: {reason}",
        f"cannot export traces endpoint=http://***@there lost=8: {reason}",
        "exporting traces again endpoint=http://***@there lost=10 seconds=605",
    ]
    assert watch.num_lost == 11, "one that comes and goes is named once in a while"


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("http://me:hush@there:4318/v1", "http://***@there:4318/v1"),
        ("https://me:hu@sh@there", "https://***@there"),
        ("https://me:hu/sh@there", "https://***@there"),
        ("me:hush@there:4317", "***@there:4317"),
        ("http://there/v1?api-key=hush", "http://there/v1?***"),
        ("Failed to parse: http://u ser:hush@there", "Failed to parse: http://***@there"),
        ("http://there:4318", "http://there:4318"),
    ],
)
def test_logs_show_no_password(endpoint: str, shown: str) -> None:
    assert without_credentials(endpoint) == shown


def test_an_exporter_that_raises_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Unsteady):
        def export(self, batch: object) -> SpanExportResult:
            raise ValueError("a span that cannot be encoded")

    watch = ExportWatch("traces", "http://there")
    assert WatchedExporter(Broken(), watch).export(["span"]) is None
    (line,) = lines(caplog)
    assert "lost=1: ValueError: a span that cannot be encoded; training goes on" in line


def test_spans_that_find_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with silence() as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        exports, provider = exporting()
        tracer = provider.get_tracer("test")
        for _ in range(5000):
            tracer.start_span("work").end()
        exports.abandon()
        provider.shutdown()
    assert exports.num_lost()["traces"] == 5000


def test_lines_that_find_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library says so: its queue drops the oldest."""
    monkeypatch.setenv("OTEL_BLRP_MAX_QUEUE_SIZE", "10")
    with silence() as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        exports, before = Exports("test"), list(logging.getLogger().handlers)
        exports.export_logs()
        (handler,) = [each for each in logging.getLogger().handlers if each not in before]
        try:
            for number in range(500):
                handler.handle(logging.LogRecord("test", logging.INFO, __file__, 1, f"line {number}", None, None))
            assert exports.num_lost()["logs"] >= 470
            exports.abandon()
            exports.close_logs()
        finally:
            logging.getLogger().removeHandler(handler)
    assert exports.num_lost()["logs"] >= 500, "the warning about them is a line, too"


def test_what_is_not_exported_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert Exports("test").spans() is None
    assert lines(caplog) == ["traces are not exported: OTEL_EXPORTER_OTLP_ENDPOINT is not set"]
