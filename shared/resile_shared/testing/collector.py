"""A trace collector: keeps the spans that services export by OTLP over HTTP."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
DELAY = "OTEL_BSP_SCHEDULE_DELAY"
_NANOSECONDS = 1e9


@dataclass(frozen=True)
class Span:
    """A span; times in seconds since the epoch."""

    name: str
    begin: float
    end: float
    attributes: dict[str, str | int]


@dataclass
class Collector:
    """All spans, by trace."""

    url: str = ""
    traces: defaultdict[bytes, list[Span]] = field(default_factory=lambda: defaultdict(list))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make services export to it, with a short delay."""
        return {ENDPOINT: self.url, DELAY: "1000"}

    def started_by(self, name: str) -> list[list[Span]]:
        """Return the traces that contain a span of that name, in the order of these spans."""
        found = [(span.begin, spans) for spans in list(self.traces.values()) for span in spans if span.name == name]
        return [spans for _, spans in sorted(found, key=lambda item: item[0])]

    def add(self, body: bytes) -> None:
        """Add the spans of one export request."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {a.key: a.value.string_value or a.value.int_value for a in span.attributes}
                    begin, end = span.start_time_unix_nano / _NANOSECONDS, span.end_time_unix_nano / _NANOSECONDS
                    self.traces[span.trace_id].append(Span(span.name, begin, end, attributes))


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector while the block runs."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.add(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()
